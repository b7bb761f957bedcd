"""Context parallelism: a window's tokens lie spread over ranks, and every mixer trades them for heads and back.

Rank r of P holds tokens r T / P to (r + 1) T / P - 1 of a packed row of T. What acts on single tokens (norms,
projections, feed-forward, head) needs nothing else. A mixer sends each rank the heads that are that rank's and gets its
own heads of all T tokens: convolution, recurrence and softmax attention then run as on one device, over the whole row
and its document bounds. A second exchange brings the outputs back. So it is exact, for any mixer whose heads do not
interact, and P can go up to the number of heads (Ulysses: Jacobs et al., arXiv 2309.14509).

Every rank computes the gradient of its own tokens' losses; parameters' gradients are to be summed over the ranks.
"""

import dataclasses

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Context:
    """The ranks that share a window: `degree` of them, of which this is number `rank` in the order of tokens."""

    group: dist.ProcessGroup
    rank: int
    degree: int

    def to_heads(self, *parts):
        """[1, T / P, C] of all heads -> [1, T, C / P] of this rank's heads, for each part, in one exchange.

        A part's channels lie head by head; all parts have one dtype.
        """
        tokens, sizes = parts[0].shape[1], [part.shape[-1] // self.degree for part in parts]
        blocks = [part.reshape(tokens, self.degree, size) for part, size in zip(parts, sizes, strict=True)]
        blocks = torch.cat(blocks, dim=-1)  # [T / P, P, C / P]
        rows = _Exchange.apply(blocks.transpose(0, 1).contiguous(), self.group)  # [P, T / P, C / P]
        return rows.view(1, tokens * self.degree, -1).split(sizes, dim=-1)

    def to_tokens(self, x):
        """The way back: [1, T, C / P] of this rank's heads -> [1, T / P, C] of all heads."""
        blocks = x.reshape(self.degree, -1, x.shape[-1]).contiguous()  # [P, T / P, C / P]
        return _Exchange.apply(blocks, self.group).transpose(0, 1).flatten(1)[None]

    def mine(self, parameter, sizes=None):
        """The rows of a per-head parameter that belong to this rank's heads; `sizes`: of parts that lie one by one."""
        parts = [parameter] if sizes is None else parameter.split(sizes)
        return torch.cat([part.chunk(self.degree)[self.rank] for part in parts if len(part)])

    def slice(self, x):
        """This rank's tokens of a whole row [1, T]."""
        return x.chunk(self.degree, dim=1)[self.rank]

    def total(self, count):
        """The sum of a tensor over the ranks; not differentiable."""
        count = count.clone()
        dist.all_reduce(count, group=self.group)
        return count


class _Exchange(torch.autograd.Function):
    """Block p of [P, ...] goes to rank p, whose block comes in its place; the gradient takes the same way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y.detach()  # compiled by torch 2.11, a tensor that was changed in place would lose its gradient

    @staticmethod
    def backward(ctx, dy):
        return _Exchange.apply(dy.contiguous(), ctx.group), None


def check_context(config, degree):
    """Raise ValueError unless the heads of every mixer can be spread over `degree` ranks.

    Key/value heads of softmax attention that are fewer than the ranks are repeated, each rank with a copy of its own.
    """
    heads = {}
    if "linear_attention" in config.layer_types:
        heads["linear_num_key_heads"] = config.linear_num_key_heads  # value heads are a multiple of it
    if "full_attention" in config.layer_types:
        heads["num_attention_heads"] = config.num_attention_heads
    for name, count in heads.items():
        if count % degree:
            raise ValueError(
                f"a window cannot be spread over {degree} ranks: {name} is {count}; take a divisor of it as degree."
            )
    groups = config.num_key_value_heads
    if "full_attention" in config.layer_types and groups % degree and degree % groups:
        raise ValueError(
            f"a window cannot be spread over {degree} ranks: num_key_value_heads is {groups}; "
            "take a divisor or a multiple of it as degree."
        )


def spread_context(model, context):
    """From now on every forward of `model` gets this rank's tokens of a row that all ranks of `context` share.

    They are input_ids (or inputs_embeds) and targets [1, T / P], with the bounds `cu_seq_lens_q` of the whole row. The
    ranks' losses sum to the row's loss (num_items_in_batch: of the whole row, which is also the default), and so do
    their gradients.

    Raises:
        ValueError: heads that do not spread (see `check_context`).
    """
    check_context(model.config, context.degree)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            kept = max(module.config.num_key_value_heads // context.degree, 1)  # a rank's key/value heads
            module.num_key_value_groups = module.config.num_attention_heads // context.degree // kept
    model.base_model.context = context
