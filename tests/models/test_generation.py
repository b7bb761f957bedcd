"""generate(): with a cache exactly the text that recomputing everything gives; on a CPU, and on a GPU where marked."""

import string

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    TextStreamer,
    pipeline,
    set_seed,
)

from triadic.models.cache import CACHE_NAME

NEW = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def make_model(make_model, device):
    return lambda *args, **kwargs: make_model(*args, **kwargs).to(device)


@pytest.fixture
def tokens(tokens, device):
    return lambda *args, **kwargs: tokens(*args, **kwargs).to(device)


@pytest.fixture
def model(kind, make_model):
    return make_model(kind)


def generate(model, ids, **kwargs):
    """Without compiling, which generate() does for static caches on GPUs and test_gpu.py looks at."""
    kwargs = {"disable_compile": "compile_config" not in kwargs, **kwargs}
    kwargs = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **kwargs}
    return model.generate(ids, **kwargs)


def test_greedy(model, tokens):
    """Three rows; the reference is an argmax loop without generate() and without a cache."""
    ids = tokens(3, 5)
    expected = ids
    with torch.no_grad():
        for _ in range(NEW):
            step = model(expected, use_cache=False).logits[:, -1].argmax(-1)
            expected = torch.cat([expected, step[:, None]], dim=1)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
    assert len({tuple(row) for row in expected[:, 5:].tolist()}) == 3  # not one text for all


@pytest.mark.parametrize("beams", [2, 4])
def test_beams(model, tokens, beams):
    ids = tokens(2, 5)
    with_cache = generate(model, ids, num_beams=beams)
    assert torch.equal(with_cache, generate(model, ids, num_beams=beams, use_cache=False))
    for row in range(2):
        assert torch.equal(with_cache[row : row + 1], generate(model, ids[row : row + 1], num_beams=beams))


def test_beams_move_the_states(make_model, tokens):
    """The best beams change places on the way, so that a cache that is not reordered would differ."""
    model, ids, moves = make_model("gdn"), tokens(1, 5), []
    layer = type(model.model.layers[0].mixer)
    forward = layer.forward

    def spy(self, hidden_states, layout, cache=None, *args):
        if cache is not None and cache.get_seq_length() and self.layer_idx == 0:
            moves.append(cache.layers[0].recurrent_states[0].clone())
        return forward(self, hidden_states, layout, cache, *args)

    layer.forward = spy
    try:
        generate(model, ids, num_beams=4, max_new_tokens=12)
    finally:
        layer.forward = forward
    assert len(moves) == 11
    assert any(torch.equal(state[0], state[1]) for state in moves[1:])  # one beam's state copied to another


def test_batch_equals_rows(model, tokens):
    rows = [tokens(n, seed=n) for n in (2, 6, 4)]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    batch = generate(model, ids, attention_mask=(ids != 0).long())
    for i, row in enumerate(rows):
        assert torch.equal(batch[i, width:], generate(model, row[None])[0, len(row) :])


def test_sampling(model, tokens):
    """With the same seed sampling draws the same text with and without a cache, and other seeds other texts."""

    def sample(seed, **kwargs):
        set_seed(seed)
        return generate(model, ids, do_sample=True, temperature=0.7, top_k=20, **kwargs)

    ids = tokens(2, 5)
    assert torch.equal(sample(0), sample(0, use_cache=False))
    assert any(not torch.equal(sample(0), sample(seed)) for seed in range(1, 4))


def test_several_samples_a_prompt(model, tokens):
    set_seed(0)
    assert generate(model, tokens(2, 5), do_sample=True, num_return_sequences=3).shape == (6, 5 + NEW)


def test_conversation_goes_on_from_the_returned_cache(model, tokens):
    first, second = tokens(1, 5), tokens(1, 4, seed=7)
    turn = generate(model, first, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences, second], dim=1)
    cache = turn["cache"] if "cache" in turn else turn["past_key_values"]
    assert cache.get_seq_length() == 5 + NEW - 1  # the last token was never fed
    name = "cache" if "cache" in turn else "past_key_values"
    assert torch.equal(generate(model, ids, **{name: cache}), generate(model, ids))


def test_prefill_in_chunks(model, tokens):
    ids = tokens(2, 11)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), generate(model, ids))


def test_from_embeddings(make_model, tokens):
    model, ids = make_model("gdn"), tokens(1, 5)
    embeds = model.get_input_embeddings()(ids)
    new = model.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(new, generate(model, ids)[:, 5:])


def test_every_sequence_ends_at_eos(make_model, tokens):
    model, ids = make_model("gdn"), tokens(3, 5)
    free = generate(model, ids)
    eos = int(free[0, 7])
    ended = generate(model, ids, eos_token_id=eos, pad_token_id=0)
    for row, text in zip(ended[:, 5:].tolist(), free[:, 5:].tolist(), strict=True):
        cut = text.index(eos) + 1 if eos in text else len(text)
        assert row[:cut] == text[:cut]
        assert not any(row[cut:])


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"num_return_sequences": 2}])
def test_static_cache(model, tokens, settings):
    """Rows of two lengths, padded on the left: the text of a dynamic cache."""
    ids = tokens(2, 9)
    ids[0, :3] = 0
    settings = {"attention_mask": (ids != 0).long(), "num_beams": settings.get("num_return_sequences", 1), **settings}
    assert torch.equal(
        generate(model, ids, cache_implementation="static", **settings), generate(model, ids, **settings)
    )


@pytest.mark.parametrize("chunk", [None, 4])
def test_only_the_step_is_compiled(make_model, tokens, chunk):
    """Two calls, padded prompts of two lengths: one graph without breaks, the text of eager steps."""
    model, graphs = make_model("hybrid"), []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = CompileConfig(backend=record, mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # by itself generate() compiles on GPUs alone
    for length in (9, 7):
        ids = tokens(2, length)
        ids[0, :3] = 0
        settings = {"attention_mask": (ids != 0).long(), "prefill_chunk_size": chunk, "max_cache_len": 9 + NEW}
        made = generate(model, ids, cache_implementation="static", compile_config=compiled, **settings)
        assert torch.equal(made, generate(model, ids, attention_mask=settings["attention_mask"]))
    assert len(graphs) == 1


def test_static_cache_again(make_model, tokens):
    """A second conversation in the same memory, after reset()."""
    model, ids = make_model("hybrid"), tokens(2, 5)
    cache = StaticCache(model.config, max_cache_len=5 + NEW)
    first = generate(model, ids, **{CACHE_NAME: cache})
    state = cache.layers[0].recurrent_states[0].data_ptr()
    cache.reset()
    assert torch.equal(generate(model, ids, **{CACHE_NAME: cache}), first)
    assert cache.layers[0].recurrent_states[0].data_ptr() == state


@pytest.fixture
def tokenizer():
    """A character a token, 61 of them."""
    characters = Tokenizer(WordLevel({c: i for i, c in enumerate(string.printable[:61])}, unk_token="0"))
    characters.pre_tokenizer, characters.decoder = Split(Regex("."), "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="0", pad_token="0", padding_side="left")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_stop_strings(make_model, tokens, tokenizer, cache):
    model, ids = make_model("hybrid"), tokens(1, 5)
    text = tokenizer.decode(generate(model, ids)[0, 5:])
    stopped = generate(model, ids, stop_strings=[text[2:4]], tokenizer=tokenizer, cache_implementation=cache)
    assert tokenizer.decode(stopped[0, 5:]) == text[: text.index(text[2:4]) + 2]


def test_streaming(make_model, tokens, tokenizer):
    model, ids, pieces = make_model("hybrid"), tokens(1, 5), []

    class Pieces(TextStreamer):
        def put(self, value):
            pieces.append(tokenizer.decode(value.flatten()))

        def end(self):
            pieces.append("")

    made = generate(model, ids, streamer=Pieces(tokenizer))[0]
    assert pieces == [tokenizer.decode(ids[0]), *(tokenizer.decode(token) for token in made[5:]), ""]


def test_pipeline(make_model, tokens, tokenizer):
    """Two prompts of different lengths in one batch: the text of each alone."""
    model = make_model("hybrid")
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    rows = [tokens(n, seed=n) for n in (3, 6)]
    prompts = [tokenizer.decode(row) for row in rows]
    made = write(prompts, max_new_tokens=NEW, do_sample=False, return_full_text=False, batch_size=2)
    for row, (found,) in zip(rows, made, strict=True):
        new = generate(model, row[None])[0, len(row) :]
        assert found["generated_text"] == tokenizer.decode(new, skip_special_tokens=True)


def test_other_caches(make_model, tokens):
    for implementation in ("offloaded", "offloaded_static"):
        with pytest.raises(ValueError, match="an offloaded cache cannot hold recurrent states: use a DynamicCache or"):
            generate(make_model("hybrid"), tokens(2, 5), cache_implementation=implementation)


def test_assisted_decoding_is_refused(make_model, tokens):
    """It would have to take tokens back, which a recurrent state cannot."""
    model = make_model("gdn")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, tokens(1, 5), assistant_model=make_model("gdn", seed=1))


def test_auto_class_generates(make_model, tokens, tmp_path):
    model, ids = make_model("hybrid"), tokens(1, 5)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        generate(AutoModelForCausalLM.from_pretrained(tmp_path).to(ids.device), ids), generate(model, ids)
    )
