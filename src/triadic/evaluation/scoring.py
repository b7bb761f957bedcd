"""Score tokens with any causal language model without ever holding the logits of a whole long sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 25  # entries of the largest logits tensor: 128 MiB in float32


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    input_ids, targets [B, T] int64: targets[b, t] is what follows input_ids[b, :t + 1]. Returns [B, T] float32.
    Models with a `token_losses` method (ours) are asked; any other goes through its body once and its output
    projection in pieces.
    """
    if hasattr(model, "token_losses"):
        return model.token_losses(input_ids, shift_labels=targets)
    hidden = hidden_states(model, input_ids)  # [B, T, D]
    losses, _ = score_hidden(model, hidden.flatten(0, 1), targets.flatten())
    return losses.view(targets.shape)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The body's output, what the output projection reads. [B, T] -> [B, T, D]"""
    return model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


@torch.no_grad()
def score_hidden(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and greedy hits of hidden states [N, D] against targets [N]: ([N] float32, [N] bool).

    The projection runs in the model's dtype, the softmax in float32, at most LOGITS_AT_ONCE logits at a time.
    """
    head = model.get_output_embeddings()
    step = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    losses, hits = [], []
    for rows, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        logits = head(rows).float()  # [n, V]
        losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        hits.append(logits.argmax(-1) == wanted)
    return torch.cat(losses), torch.cat(hits)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model's logits are finite, its output projection of its body's output, and no more.

    Some families cap or scale their logits afterwards; scoring those in pieces would be wrong without a word. Those
    whose config says so are refused even where the logits are too small yet for a difference to show.
    """
    text = model.config.get_text_config(decoder=True)
    changed = getattr(text, "final_logit_softcapping", None) is not None
    ids = torch.arange(8, device=model.device)[None] % model.get_output_embeddings().weight.shape[0]
    pieces = model.get_output_embeddings()(hidden_states(model, ids)).float()
    whole = model(input_ids=ids, use_cache=False).logits.float()
    if not whole.isfinite().all():
        raise ValueError(
            f"{type(model).__name__} gives logits that are not finite; its weights are damaged or diverged"
        )
    if changed or not torch.allclose(pieces, whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output projection (capping or scaling), "
            "which this evaluation does not support"
        )
