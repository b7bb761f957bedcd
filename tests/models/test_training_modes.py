"""Gradient checkpointing, torch.compile, autocast, carried states: none of them changes the result."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from triadic.models.modeling_triadic import compile_layers

BOUNDS = torch.tensor([0, 3, 4, 10], dtype=torch.int32)


def step(model, ids, **kwargs):
    """Loss and gradients of one training step."""
    model.zero_grad()
    loss = model(ids, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing(kind, make_model, tokens, reentrant, packed, monkeypatch):
    model, ids = make_model(kind).train(), tokens(1, 10)
    arguments = {"labels": ids, **({"cu_seq_lens_q": BOUNDS} if packed else {})}
    calls = []
    for layer in model.model.layers:
        layer.mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    loss, gradients = step(model, ids, **arguments)
    plain = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = step(model, ids, **arguments)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    assert len(calls) == 3 * plain  # once more in the backward


def test_checkpointing_with_a_cache_is_refused(make_model, tokens):
    model = make_model("gdn").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="write the cache twice"):
        model(tokens(1, 5), use_cache=True)
    assert model(tokens(1, 5)).logits is not None


def compiled_equals_eager(model, ids, close, backend, **arguments):
    loss, gradients = step(model, ids, **arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.zero_grad()
    again = compiled(ids, **arguments).loss
    again.backward()
    close(again.detach(), loss, 1e-5)
    for name, parameter in model.named_parameters():
        close(parameter.grad, gradients[name], 1e-4)


def test_compiled_fullgraph(make_model, tokens, close):
    """One graph, no break: a packed linear model with the chunked loss, traced and differentiated ahead of time."""
    model, ids = make_model("gdn", layer_types=["linear_attention"]).train(), tokens(1, 10)
    compiled_equals_eager(model, ids, close, "aot_eager", shift_labels=ids, cu_seq_lens_q=BOUNDS)


def test_compiled_hybrid(make_model, tokens, close):
    model, ids = make_model("softmax_first").train(), tokens(2, 10)
    compiled_equals_eager(model, ids, close, "aot_eager", labels=ids)


def test_compiled_checkpointed(make_model, tokens, close):
    model, ids = make_model("gdn", layer_types=["linear_attention"]).train(), tokens(1, 10)
    model.gradient_checkpointing_enable()
    compiled_equals_eager(model, ids, close, "aot_eager", shift_labels=ids, cu_seq_lens_q=BOUNDS)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layer_by_layer(make_model, tokens, close, checkpointed):
    """No breaks, one compilation for all layers of a kind, few for all numbers of documents."""
    model, ids = make_model("gdn", layer_types=["linear_attention"] * 3).train(), tokens(1, 12)
    arguments = {"shift_labels": ids, "cu_seq_lens_q": torch.tensor([0, 4, 5, 12], dtype=torch.int32)}
    loss, gradients = step(model, ids, **arguments)
    torch._dynamo.reset()
    if checkpointed:
        model.gradient_checkpointing_enable()
    counted = CompileCounterWithBackend("aot_eager")
    compile_layers(model, fullgraph=True, backend=counted)
    model.zero_grad()
    again, compiled = step(model, ids, **arguments)
    close(again, loss, 1e-5)
    for name in gradients:
        close(compiled[name], gradients[name], 1e-4)
    assert counted.frame_count == 1
    for documents in ([0, 3, 7, 12], [0, 1, 7, 9, 12], [0, 2, 3, 4, 5, 12]):  # other bounds, other numbers of them
        step(model, ids, shift_labels=ids, cu_seq_lens_q=torch.tensor(documents, dtype=torch.int32))
    assert counted.frame_count <= 3


@pytest.mark.slow
def test_compiled_by_inductor(make_model, tokens, close):
    model, ids = make_model("hybrid").train(), tokens(2, 10)
    compiled_equals_eager(model, ids, close, "inductor", labels=ids)


def test_autocast_stays_close(kind, make_model, tokens):
    """bfloat16 autocast over float32 weights: the same loss within bfloat16's rounding."""
    model, ids = make_model(kind).train(), tokens(2, 10)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids, labels=ids).loss
    assert abs(rounded / exact - 1) < 0.03


def test_gradients_flow_through_a_carried_state(make_model, tokens, close):
    """Two segments chained by a cache have the gradients of one, up to the chain's own arithmetic."""
    model, ids = make_model("gdn").train(), tokens(1, 10)
    goal = torch.randn(1, 10, 61, generator=torch.Generator().manual_seed(1))

    def gradients(logits):
        model.zero_grad()
        (logits * goal).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients(model(ids).logits)
    first = model(ids[:, :4], use_cache=True)
    cache = first["cache"] if "cache" in first else first["past_key_values"]
    chained = gradients(torch.cat([first.logits, model(ids[:, 4:], past_key_values=cache).logits], dim=1))
    for name, gradient in chained.items():
        close(gradient / expected[name].abs().max(), expected[name] / expected[name].abs().max())


def test_every_parameter_learns(kind, make_model, tokens):
    model, ids = make_model(kind).train(), tokens(2, 10)
    _, gradients = step(model, ids, labels=ids)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


def test_a_model_can_learn(kind, make_model, tokens):
    """Thirty steps on one batch memorise it."""
    model, ids = make_model(kind).train(), tokens(2, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
