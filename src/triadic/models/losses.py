"""Cross-entropy of a language-model head over a large vocabulary without the logits of a whole batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._triton import has_triton
from triadic_kernels.dispatch import plain

IGNORE_INDEX = -100
CHUNK_BYTES = 2**28  # of the logits that exist at a time
TILE = 256


def _slopes(logits, label):
    """Losses [C, 1], float32 or wider, of logits [C, V] at label [C, 1], and their derivatives [C, V] by the logits."""
    losses = -torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(1, label)
    # softmax - onehot; the label's own entry p - 1 is rounded once, from float32
    return losses, torch.softmax(logits, -1).scatter_(1, label, torch.expm1(-losses).to(logits.dtype))


# On a GPU the pieces of `_slopes` would read and write the logits nine times, in one compiled piece three times.
_compiled_slopes = torch.compile(_slopes)


def _fused(*tensors):
    """Whether `_compiled_slopes` may run: not where a compiler of the whole model fuses for itself, nor under a mode
    that must see every operation (counters of FLOPs), one call in which spoils the later ones, nor without Triton.
    """
    return tensors[0].is_cuda and plain(tensors) and has_triton()


def _add_product(total, a, b, at_once):
    """total + a @ b in place; `at_once`: a product in half precision is summed up in total's float32, never rounded."""
    if at_once and total.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(a @ b)


class _LinearCrossEntropy(torch.autograd.Function):
    """sum_i -log softmax(x_i W^T)[label_i]; both gradients are made with the loss, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, dtype):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        w = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if need_weight else None
        size = tokens_per_chunk(weight, dtype)
        fused = _fused(hidden, weight, labels)
        slopes = _compiled_slopes if fused else _slopes
        for start in range(0, hidden.shape[0], size):
            x, label = hidden[start : start + size].to(dtype), labels[start : start + size]
            kept = label != IGNORE_INDEX
            label = label.where(kept, 0)[:, None]
            losses, slope = slopes(x @ w.T, label)  # [C, 1], [C, V]
            total = total + (losses[:, 0] * kept).sum()
            if need_hidden:
                grad_hidden[start : start + size] = (slope @ w) * kept[:, None]
            if need_weight:
                _add_product(grad_weight, slope.T, x * kept[:, None], fused)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype)
        grad_weight = None if grad_weight is None else (grad_weight * grad_total).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _losses(logits, labels):
    """Negative log-likelihoods [C] (0 where ignored) of logits [C, V]."""
    kept = labels != IGNORE_INDEX
    target = logits.gather(1, labels.where(kept, 0)[:, None])[:, 0]
    return (logits.logsumexp(-1) - target) * kept


def tokens_per_chunk(weight, dtype=torch.float32):
    """Tokens whose logits fill CHUNK_BYTES: whole tiles of a matrix product (256 rows), where the vocabulary leaves
    room for one.
    """
    tokens = CHUNK_BYTES // dtype.itemsize // weight.shape[0]
    return tokens // TILE * TILE or max(tokens, 1)


def compute_dtype(x):
    """The dtype of a matrix product of `x`: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class LanguageModelHead(nn.Linear):
    """The output projection, which can also turn hidden states into losses without forming all logits.

    The loss lives inside this module's forward so that whatever gathers a module's weight around its call (ZeRO-3,
    FSDP) works for it too.
    """

    def forward(self, hidden_states, labels=None, reduction="sum"):
        """Logits [..., V]; or with labels [...] (-100: ignored) the summed loss, or with reduction "none" each [...].

        The sum is differentiable, the single losses are for evaluation.
        """
        if labels is None:
            return super().forward(hidden_states)
        hidden, labels = hidden_states.flatten(0, -2), labels.flatten().to(hidden_states.device)
        dtype = compute_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            followed = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
            if reduction == "sum" and followed:
                return _LinearCrossEntropy.apply(hidden, self.weight, labels, dtype)
            losses = self._token_losses(hidden.to(dtype), labels)
            return losses.sum() if reduction == "sum" else losses.view(hidden_states.shape[:-1])

    @classmethod
    def like(cls, linear):
        """A head that shares the weight of `linear` (transformers replaces the head when the vocabulary grows)."""
        head = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        head.weight = linear.weight
        return head

    @torch.no_grad()
    def _token_losses(self, hidden, labels):
        weight, size = self.weight.to(hidden.dtype), tokens_per_chunk(self.weight)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = [
            _losses(F.linear(x, weight).to(dtype), label)
            for x, label in zip(hidden.split(size), labels.split(size), strict=True)
        ]
        return torch.cat(losses)


def shift(labels):
    """Targets of each position from unshifted labels [B, T]: the next label, -100 at the end."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
