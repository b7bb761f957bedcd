"""The lm-eval wrapper against lm-eval's own `hf` wrapper, hand-made sums, and its promises about padding and length."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from triadic.evaluation.harness import TriadicLM, adds_bos, run_task


def asks(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """A multiple-choice, a generation and a rolling task on invented documents, as static files."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {
            "question": f"{word} ka lo mi",
            "choices": ["ter su", "no ra vel pi", "don"],
            "answer": i % 3,
            "page": word * 9,
        }
        for i, word in enumerate(["kalo", "miter su", "nora", "velpi don ka", "terter", "sulo mi"])
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\ntest_split: test\n"
    (folder / "choose.yaml").write_text(
        f"task: choose\n{common}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (folder / "write.yaml").write_text(
        f"task: write\n{common}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\ndoc_to_target: page\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "roll.yaml").write_text(
        f"task: roll\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{page}}}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]\n"
    )
    return folder


def static(folder) -> TaskManager:
    return TaskManager(include_path=str(folder), include_defaults=False)


def answers(results, task):
    """The metrics of a task, and what the model answered to every document."""
    return results["results"][task], [sample["filtered_resps"] for sample in results["samples"][task]]


def test_fewer_documents_than_processes_are_the_first_ones(llama, task_folder, monkeypatch):
    """lm-eval ends where a process has no document."""
    alone = TriadicLM(str(llama))
    want = answers(run_task(alone, "choose", static(task_folder), 2), "choose")
    for rank in (0, 1, 2):
        monkeypatch.setattr(alone, "_rank", rank)
        monkeypatch.setattr(alone, "_world_size", 3)
        found = run_task(alone, "choose", static(task_folder), 2)
        assert alone.world_size == 3
        assert found is None if rank else answers(found, "choose") == want


@pytest.mark.parametrize("task", ["choose", "write"])
def test_scores_equal_lm_evals_own_wrapper(hf_folder, task_folder, task):
    ours = run_task(TriadicLM(str(hf_folder), batch_size=4), task, static(task_folder))
    stock_lm = HFLM(str(hf_folder), device="cpu", dtype="float32", batch_size=4, softmax_dtype="float32")
    stock = run_task(stock_lm, task, static(task_folder))
    (metrics, replies), (stock_metrics, stock_replies) = answers(ours, task), answers(stock, task)
    assert metrics == stock_metrics
    if task == "write":
        assert replies == stock_replies
        assert any(reply[0] for reply in replies)
    else:
        values, stock_values = torch.tensor(replies), torch.tensor(stock_replies)  # [6, 3, (log-likelihood, greedy)]
        torch.testing.assert_close(values, stock_values, rtol=1e-5, atol=1e-5)


def test_rolling_equals_lm_evals_where_that_scores_no_second_bos(llama, task_folder, tmp_path):
    """A tokenizer that adds no BOS by itself: there both wrappers mean the same."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(tmp_path)
    assert adds_bos(AutoTokenizer.from_pretrained(llama))
    assert not adds_bos(AutoTokenizer.from_pretrained(tmp_path))
    ours = run_task(TriadicLM(str(llama), tokenizer=str(tmp_path)), "roll", static(task_folder))
    stock_lm = HFLM(str(llama), tokenizer=str(tmp_path), device="cpu", dtype="float32", softmax_dtype="float32")
    stock = run_task(stock_lm, "roll", static(task_folder))
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        assert ours["results"]["roll"][metric] == pytest.approx(stock["results"]["roll"][metric], rel=1e-6)


def test_rolling_scores_each_token_once_after_one_bos(silent, tokenizer):
    """With every token at log(512) the sum counts them."""
    text = "kalo mi ter su nora"
    ids = tokenizer.encode(text, add_special_tokens=False)
    (total,) = TriadicLM(str(silent)).loglikelihood_rolling(asks("loglikelihood_rolling", (text,)))
    assert -total / torch.tensor(512.0).log().item() == pytest.approx(len(ids), rel=1e-6)
    (marked,) = TriadicLM(str(silent)).loglikelihood_rolling(asks("loglikelihood_rolling", ("<s>" + text,)))
    assert marked == pytest.approx(total)


def test_rolling_falls_into_windows(llama):
    text = "kalo mi ter su nora vel pi don " * 4
    lm = TriadicLM(str(llama), max_length=10)
    ids = lm.tok_encode(text, add_special_tokens=False)
    expected = 0.0
    for start in range(0, len(ids), 10):
        piece = ids[start : start + 10]
        left = min(start, 10 - len(piece))  # the last window is filled up on the left
        before = [1] if start == 0 else ids[start - left - 1 : start]
        with torch.no_grad():
            logits = lm.model(torch.tensor([before + piece[:-1]])).logits[0, -len(piece) :].log_softmax(-1)
        expected += logits[torch.arange(len(piece)), torch.tensor(piece)].sum().item()
    assert lm.loglikelihood_rolling(asks("loglikelihood_rolling", (text,)))[0] == pytest.approx(expected, rel=1e-5)


def test_loglikelihood_equals_a_sum_by_hand(hf_folder, tokenizer):
    lm = TriadicLM(str(hf_folder))
    pairs = [("kalo mi", " ter su"), ("kalo mi", " ter don"), ("nora", " vel"), ("", "pi don ka"), ("don ", "su")]
    model = AutoModelForCausalLM.from_pretrained(hf_folder).eval()
    for (context, continuation), (value, greedy) in zip(
        pairs, lm.loglikelihood(asks("loglikelihood", *pairs)), strict=True
    ):
        whole = [1, *tokenizer.encode(context + continuation, add_special_tokens=False)]
        split = len(tokenizer.encode(context.rstrip(), add_special_tokens=False)) + 1
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        expected = sum(logits[t - 1, whole[t]].item() for t in range(split, len(whole)))
        assert value == pytest.approx(expected, rel=1e-5)
        assert greedy == all(logits[t - 1].argmax() == whole[t] for t in range(split, len(whole)))


def test_a_greedy_continuation_is_known_as_one(llama):
    lm = TriadicLM(str(llama))
    ids = lm.tok_encode("kalo mi")
    with torch.no_grad():
        best = lm.model(torch.tensor([ids])).logits[0, -1].argmax().item()
        then = lm.model(torch.tensor([[*ids, best]])).logits[0, -1].argmax().item()
    asked = [
        (None, ids, [best]),
        (None, ids, [(best + 1) % 512]),
        (None, ids, [best, then]),
        (None, ids, [best, then + 1]),
    ]
    (first, yes), (second, no), (_, both), (_, half) = lm._loglikelihood_tokens(asked)
    assert (yes, no, both, half) == (True, False, True, False)
    assert first > second


def test_batch_size_does_not_change_scores(hf_folder):
    words = ["ka", "lo mi", "ter su no", "ra vel pi don", "ka ka ka ka ka", "mi mi"]
    scored = asks("loglikelihood", *[(word * n, " su") for n, word in enumerate(words, 1)])
    written = asks(
        "generate_until", *[(word * n, {"max_gen_toks": 8, "do_sample": False}) for n, word in enumerate(words, 1)]
    )
    one = TriadicLM(str(hf_folder), batch_size=1)
    alone = one.loglikelihood(scored), one.generate_until(written)
    for options in ({"batch_size": 6}, {"batch_size": 6, "batch_tokens": 20}):
        lm = TriadicLM(str(hf_folder), **options)
        torch.testing.assert_close(torch.tensor(lm.loglikelihood(scored)), torch.tensor(alone[0]), rtol=1e-5, atol=1e-5)
        assert lm.generate_until(written) == alone[1]


def test_batches_are_limited_in_sequences_and_tokens(llama):
    batches = TriadicLM(str(llama), batch_size=3, batch_tokens=20).batches
    lengths = [4, 30, 5, 9, 5, 8, 1]
    made = list(batches.run(lengths, lambda batch: [lengths[i] for i in batch]))
    assert sorted(i for batch, _ in made for i in batch) == list(range(7))
    assert [answers for _, answers in made] == [[30], [9, 8], [5, 5, 4], [1]]


def test_batches_shrink_when_memory_runs_out(hf_folder, monkeypatch):
    """A device on which 40 tokens fit: the size is found, and scores and texts are those of one by one."""
    prompts = ["ka " * n for n in (1, 30, 9, 2, 5, 12, 3)]
    scored = asks("loglikelihood", *[(prompt, " su") for prompt in prompts])
    written = asks("generate_until", *[(prompt, {"max_gen_toks": 6, "do_sample": False}) for prompt in prompts])
    one, lm = TriadicLM(str(hf_folder), batch_size=1), TriadicLM(str(hf_folder))
    expected = one.loglikelihood(scored), one.generate_until(written)
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(type(lm.model.base_model), "forward", _guard(type(lm.model.base_model).forward, sizes))
    values = lm.loglikelihood(scored)
    assert max(rows for rows, _ in sizes) > 1
    assert lm.batches.tokens <= 40
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
    assert lm.generate_until(written) == expected[1]
    with pytest.raises(ValueError, match=r"one sequence of .* tokens does not fit into the device's memory"):
        lm.loglikelihood(asks("loglikelihood", ("ka " * 200, " su")))


def _guard(forward, sizes):
    """A body's forward pass that runs out of memory beyond 40 tokens."""

    def guarded(self, input_ids=None, **options):
        sizes.append(tuple(input_ids.shape))
        if input_ids.numel() > 40:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, input_ids=input_ids, **options)

    return guarded


def test_padded_prompts_give_the_logits_of_unpadded_ones(hf_folder):
    lm = TriadicLM(str(hf_folder))
    prompts = ["ka", "kalo mi ter su nora", "don pi vel"]
    ids, mask = lm.tok_batch_encode(prompts)
    assert ids.shape == mask.shape
    with torch.no_grad():
        padded = lm.model(ids, attention_mask=mask).logits  # [3, T, V]
        for row, prompt in enumerate(prompts):
            alone = lm.tok_encode(prompt)
            assert ids[row, mask[row].bool()].tolist() == alone
            assert mask[row].tolist() == [0] * (ids.shape[1] - len(alone)) + [1] * len(alone)
            logits = lm.model(torch.tensor([alone])).logits[0]
            torch.testing.assert_close(padded[row, -len(alone) :], logits, rtol=1e-4, atol=1e-4)


def test_generation_passes_the_mask(hf_folder):
    """A batch with a much longer prompt in it gives each prompt its own greedy text."""
    lm = TriadicLM(str(hf_folder), batch_size=2)
    prompts = ["ka", "kalo mi ter su nora vel pi don " * 3]
    texts = lm.generate_until(asks("generate_until", *[(p, {"max_gen_toks": 10, "do_sample": False}) for p in prompts]))
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([lm.tok_encode(prompt)])
        out = lm.model.generate(input_ids=ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert text == lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_nothing_is_truncated(llama):
    lm = TriadicLM(str(llama), max_length=12)
    long = "kalo mi ter su nora vel pi don ka lo mi"
    with pytest.raises(ValueError, match="is longer than the 12"):
        lm.loglikelihood(asks("loglikelihood", (long, " ka")))
    with pytest.raises(ValueError, match="leaves no room to generate"):
        lm.generate_until(asks("generate_until", (long, {"max_gen_toks": 4})))
    fits = lm.tok_encode("kalo mi", add_special_tokens=True)
    exactly = lm.generate_until(asks("generate_until", ("kalo mi", {"max_gen_toks": 12 - len(fits)})))
    assert len(exactly) == 1


def test_one_bos_and_only_one(llama, tokenizer):
    plain = tokenizer.encode("kalo mi", add_special_tokens=False)
    lm = TriadicLM(str(llama))
    assert lm.tok_encode("kalo mi") == lm.tok_encode("<s>kalo mi") == [1, *plain]
    assert lm.tok_batch_encode(["kalo mi", "<s>kalo mi"])[0].tolist() == [[1, *plain]] * 2
    assert lm.tok_encode("kalo mi", add_special_tokens=False) == plain
    assert TriadicLM(str(llama), add_bos=False).tok_encode("kalo mi") == plain


def test_registered_with_lm_eval(llama):
    assert get_model("triadic") is TriadicLM
    lm = TriadicLM.create_from_arg_obj({"pretrained": str(llama)}, {"batch_size": 2, "max_batch_size": None})
    assert lm.get_model_info()["parameters"] == lm.model.num_parameters()


def test_limit_of_a_recurrent_model(triadic_hf, llama):
    """A purely recurrent model has none, whatever its config's max_position_embeddings says."""
    assert TriadicLM(str(triadic_hf)).max_length > 10**8
    assert TriadicLM(str(llama)).max_length == 2048
    assert TriadicLM(str(triadic_hf), max_length=7).max_length == 7
