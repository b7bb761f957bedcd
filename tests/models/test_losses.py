"""The chunked loss equals the loss over full logits (value, gradients, counts), with a chunk of logits at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from triadic.models import losses
from triadic.models.losses import LanguageModelHead


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 61 * 5)  # 5 tokens of a vocabulary of 61 in float32


@pytest.fixture
def targets(tokens):
    labels = tokens(2, 13, seed=4)
    labels[0, :3] = labels[1, 7] = labels[:, -1] = -100
    return labels


def grads(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("count", [None, 7, torch.tensor(40)], ids=["targets", "int", "tensor"])
@pytest.mark.parametrize("shifted", [True, False])
def test_value_and_gradients(make_model, tokens, targets, small_chunks, close, count, shifted):
    model, ids = make_model("hybrid").train(), tokens(2, 13)
    outputs = model(ids, **({"shift_labels": targets} if shifted else {"labels": targets}), num_items_in_batch=count)
    assert outputs.logits is None
    outputs.loss.backward()
    actual = grads(model)
    model.zero_grad()
    logits = model(ids, use_cache=False).logits.double()
    goal = targets if shifted else torch.cat([targets[:, 1:], torch.full((2, 1), -100)], dim=1)
    expected = F.cross_entropy(logits.flatten(0, 1), goal.flatten(), reduction="sum")
    expected = expected / ((goal != -100).sum() if count is None else count)
    expected.backward()
    close(outputs.loss.double(), expected, 1e-6)
    for name, gradient in grads(model).items():
        close(actual[name] / gradient.abs().max(), gradient / gradient.abs().max(), 1e-5)


@pytest.mark.parametrize("shifted", [True, False])
def test_training_and_evaluation_agree(make_model, tokens, targets, close, shifted):
    model, ids = make_model("gdn"), tokens(2, 13)
    arguments = {"shift_labels" if shifted else "labels": targets}
    with torch.no_grad():
        evaluated = model(ids, **arguments)
        assert evaluated.logits.shape == (2, 13, 61)
        close(model.train()(ids, **arguments).loss, evaluated.loss, 1e-6)
        arguments["num_items_in_batch"] = 9
        close(model(ids, **arguments).loss, model.eval()(ids, **arguments).loss, 1e-6)


def test_token_losses(make_model, tokens, targets, small_chunks, close):
    model, ids = make_model("hybrid"), tokens(2, 13)
    actual = model.token_losses(ids, targets)
    assert actual.shape == (2, 13)
    assert actual.dtype == torch.float32
    with torch.no_grad():
        log_p = model(ids).logits.double().log_softmax(-1)
    expected = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    close(actual.double(), expected, 1e-5)
    packed = model.token_losses(ids[:1], targets[:1], cu_seq_lens_q=torch.tensor([0, 5, 13]))
    close(packed[:, :5], model.token_losses(ids[:1, :5], targets[:1, :5]), 1e-5)
    close(packed[:, 5:], model.token_losses(ids[:1, 5:], targets[:1, 5:]), 1e-5)


def test_no_targets_make_no_loss(make_model, tokens):
    model, ids = make_model("gdn").train(), tokens(1, 6)
    loss = model(ids, shift_labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in grads(model).values())


def test_full_logits_never_exist(make_model, tokens, small_chunks, monkeypatch):
    """No tensor of a training step, forward or backward, is as large as the logits of more than one chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == 61:
                    self.rows = max(self.rows, x.numel() // 61)
            return out

    model, ids = make_model("gdn", hidden_size=8, linear_key_head_dim=4).train(), tokens(4, 40)
    with Largest() as largest:
        model(ids, shift_labels=ids).loss.backward()
        assert 0 < largest.rows <= 8  # 5 tokens, or the 8 rows of a transposed weight; the batch has 160
        model.token_losses(ids, ids)
        assert largest.rows <= 8


def test_head_in_every_precision(close):
    """Half-precision products with float32 sums stay within bfloat16's rounding of float64."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 16, generator=generator), torch.randn(50, 16, generator=generator) / 4
    labels = torch.randint(0, 50, (300,), generator=generator)
    exact = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    head = LanguageModelHead(16, 50, bias=False)
    head.weight.data.copy_(weight)
    close(head(hidden, labels).double(), exact, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, labels)
    assert loss.dtype == torch.float32
    close(loss.double(), exact, 1e-3)
    half = head.to(torch.bfloat16)(hidden.bfloat16(), labels)
    assert half.dtype == torch.float32
    close(half.double(), exact, 2e-3)


def test_sums_of_many_chunks_in_half_precision(monkeypatch, close):
    """With and without gradients: what bfloat16 logits lose is not lost again by sums over 100 chunks."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 2 * 50 * 3)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 16, generator=generator), torch.randn(50, 16, generator=generator) / 4
    labels = torch.randint(0, 50, (300,), generator=generator).where(torch.arange(300) % 7 > 0, -100)
    head = LanguageModelHead(16, 50, bias=False)
    head.weight.data.copy_(weight)
    logits = (hidden.bfloat16() @ weight.bfloat16().T).double().requires_grad_()
    exact = F.cross_entropy(logits, labels, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, labels)
        monkeypatch.setattr(losses, "_slopes", None)  # makes gradients
        with torch.no_grad():
            close(head(hidden, labels).double(), exact, 1e-6)
    loss.backward()
    close(loss.double(), exact, 1e-6)
    expected = torch.autograd.grad(exact, logits)[0].T @ hidden.bfloat16().double()
    assert (head.weight.grad - expected).norm() < 2.5e-3 * expected.norm()


def test_gradients_under_autocast(make_model, tokens, small_chunks):
    """Master weights in float32, products in bfloat16: the gradient points where the exact one points."""
    model, ids = make_model("gdn").train(), tokens(2, 13)
    model(ids, labels=ids).loss.backward()
    exact = grads(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, gradient in grads(model).items():
        assert gradient.dtype == torch.float32, name
        cosine = F.cosine_similarity(gradient.flatten().double(), exact[name].flatten().double(), dim=0)
        assert cosine > 0.98, (name, cosine)


def test_transformers_trainer_evaluates(make_model, tokens, close, tmp_path):
    from transformers import Trainer, TrainingArguments

    model, ids = make_model("gdn"), tokens(4, 13)
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True)
    data = [{"input_ids": row, "labels": row} for row in ids]
    found = Trainer(model, arguments, eval_dataset=data).evaluate()
    with torch.no_grad():
        close(torch.tensor(found["eval_loss"]), F.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:]))


def test_targets_may_be_a_view(make_model, tokens, targets, close):
    model, ids = make_model("gdn"), tokens(2, 13)
    view = torch.cat([tokens(2, 1), targets], dim=1)[:, 1:]
    for mode in (True, False):
        close(model.train(mode)(ids, shift_labels=view).loss, model(ids, shift_labels=targets).loss)


@pytest.mark.parametrize(
    ("vocabulary", "tokens"), [(32_000, 2048), (61, 1_100_032), (2**18, 256), (300_000, 223), (2**27, 1)]
)
def test_chunks_are_whole_tiles(vocabulary, tokens):
    """At most 2**28 bytes of logits (but for a single token's), in whole tiles of 256 rows where one has room."""
    assert losses.tokens_per_chunk(torch.empty(vocabulary, 1, device="meta")) == tokens
    assert losses.tokens_per_chunk(torch.empty(2 * vocabulary, 1, device="meta"), torch.bfloat16) == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes(dtype, close):
    """softmax - onehot, each entry rounded once, also at a label that is nearly certain."""
    logits = torch.randn(40, 61, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    logits[3, 7] = 12
    label = torch.arange(40).add(4).remainder(61)[:, None]
    found, slope = losses._slopes(logits, label)
    p = logits.double().softmax(-1)
    exact = p - F.one_hot(label[:, 0], 61)
    assert found.dtype == torch.float32
    assert slope.dtype == dtype
    close(found.double(), -p.gather(1, label).log(), 1e-5)
    error = (slope.double() - exact).abs() / exact.abs()
    assert error.max() < {torch.float32: 1e-4, torch.bfloat16: 2**-8}[dtype]


@pytest.mark.slow  # Inductor's C++ for a CPU
def test_compiled_slopes_of_any_count():
    assert torch._dynamo.explain(losses._slopes)(torch.zeros(2, 61), torch.zeros(2, 1).long()).graph_break_count == 0
    for count in (40, 24, 7):
        logits = torch.randn(count, 61, generator=torch.Generator().manual_seed(count))
        label = torch.arange(count).remainder(61)[:, None]
        for compiled, plain in zip(losses._compiled_slopes(logits, label), losses._slopes(logits, label), strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_of_the_two_is_frozen(trained):
    head, hidden, labels = LanguageModelHead(8, 61, bias=False), torch.randn(5, 8), torch.arange(5)
    hidden.requires_grad_(trained == "hidden")
    head.weight.requires_grad_(trained == "weight")
    found = (hidden, head.weight)[trained == "weight"]
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ head.weight.T, labels, reduction="sum"), found)
    head(hidden, labels).backward()
    torch.testing.assert_close(found.grad, expected)


def test_when_slopes_are_compiled(monkeypatch):
    """On a GPU with Triton, unless someone has to see the operations: a mode, or a compiler of all."""
    called, triton = [], [True]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(losses, "has_triton", lambda: triton[0])
    monkeypatch.setattr(losses, "_compiled_slopes", lambda *given: (called.append(1), losses._slopes(*given))[1])
    head, hidden, labels = LanguageModelHead(8, 61, bias=False), torch.randn(5, 8), torch.arange(5)
    head(hidden, labels)
    assert called == [1]
    with FlopCounterMode(display=False) as counter:
        head(hidden, labels)
    assert counter.get_total_flops() == 2 * 2 * 5 * 8 * 61  # logits and the weight's gradient
    torch.compile(head, backend="aot_eager", fullgraph=True)(hidden, labels)
    triton[0] = False
    head(hidden, labels)
    assert called == [1]
