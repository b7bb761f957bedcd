"""Softmax attention over the back ends of transformers; packed rows never form a T x T mask.

Which back end a packed row takes follows `attn_implementation` alone:
    flash_attention_*   its own variable-length kernel
    flex_attention      a block mask built from the document bounds (tiles of 128, never elements)
    sdpa                torch's varlen_attn on a GPU in half precision without dropout; else one call per document
    any other           one call per document
One call per document reads the bounds on the host, which breaks a compiled graph; the other ways do not.
A step of decoding with a mask (a static cache, padded prompts) leaves sdpa for `one_token`.
"""

import inspect

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

BLOCK = 128
logger = logging.get_logger(__name__)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention in plain torch that returns its weights: q [B,H,T,D], k, v [B,HKV,S,D], additive mask [B,1,T,S]."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attend(module, q, k, v, attention_mask, layout):
    """Causal attention of q [B,H,T,D] on k, v [B,HKV,S,D]: (output [B,T,H,D], weights or None)."""
    implementation = module.config._attn_implementation
    back_end = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    settings = {"scaling": module.scaling, "dropout": module.config.attention_dropout if module.training else 0.0}
    if implementation == "sdpa" and q.shape[2] == 1 and attention_mask is not None and not module.training:
        return one_token(module, q, k, v, attention_mask), None
    if not layout.packed:
        return back_end(module, q, k, v, attention_mask, **settings)
    if implementation == "flex_attention":
        return back_end(module, q, k, v, document_block_mask(layout.cu_seqlens, q.shape[2]), **settings)
    if implementation.startswith("flash_attention"):
        bounds, longest = layout.cu_seqlens, layout.longest()
        return back_end(
            module, q, k, v, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest,
            max_length_k=longest, **settings,
        )  # fmt: skip
    if implementation == "sdpa" and in_one_call(q, settings["dropout"]):
        return varlen(module, q, k, v, layout), None
    return per_document(module, back_end, q, k, v, layout.cu_seqlens, settings), None


def in_one_call(q, dropout):
    """Whether torch's varlen_attn takes a packed row; it knows no dropout."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if dropout:
        logger.warning_once("attention_dropout: packed documents go through sdpa one by one, which is slower.")
    return not dropout


def one_token(module, q, k, v, attention_mask):
    """Attention of one query a row [B,H,1,D] on k, v [B,HKV,S,D], mask [B,1,1,S] boolean or additive: [B,1,H,D].

    Every key and value is read once for the heads that share it. Given a mask, torch's sdpa wants them repeated for
    each head: on an H200 with 8 heads to a key that takes up to 19 times as long (decode_attention_*.json of
    kernels/benchmarks/results).
    """
    q = q.view(len(q), k.shape[1], -1, q.shape[3])  # [B, HKV, G, D]
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * module.scaling
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v).flatten(1, 2)[:, None]


def varlen(module, q, k, v, layout):
    """torch's variable-length flash attention on one packed row: [1, H, T, D] -> [1, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    if "enable_gqa" in accepted:
        settings = {"enable_gqa": True}
    else:
        settings, groups = {}, module.num_key_value_groups
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    settings |= {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if "scale" in accepted:
        settings["scale"] = module.scaling
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, D]
    bounds, longest = layout.cu_seqlens, layout.longest()
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **settings)[None]


def per_document(module, back_end, q, k, v, cu_seqlens, settings):
    """One call of `back_end` per document of a packed row: [1, H, T, D] -> [1, T, H, D]."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    outputs = []
    for q_doc, k_doc, v_doc in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        mask = None
        if back_end is eager_attention:
            mask = q.new_full((q_doc.shape[2], q_doc.shape[2]), -torch.inf).triu(1)
        outputs.append(back_end(module, q_doc, k_doc, v_doc, mask, **settings)[0])
    return torch.cat(outputs, dim=1)


def document_block_mask(cu_seqlens, length):
    """Causal attention inside documents as a flex_attention BlockMask, found per tile of 128 x 128 tokens."""
    device = cu_seqlens.device
    tokens = torch.arange(length, device=device)
    starts = cu_seqlens[
        torch.searchsorted(cu_seqlens, tokens, right=True, out_int32=True) - 1
    ]  # of each token's document
    rows = torch.arange(0, length, BLOCK, device=device) // BLOCK  # tiles
    first = starts[rows * BLOCK] // BLOCK  # the first tile a tile of queries can see
    count = (rows - first + 1).to(torch.int32)
    columns = torch.minimum(first[:, None] + rows[None, :], rows[-1]).to(torch.int32)

    def visible(b, h, q_index, k_index):
        return (q_index >= k_index) & (k_index >= starts[q_index])

    return BlockMask.from_kv_blocks(
        count[None, None], columns[None, None], BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )
