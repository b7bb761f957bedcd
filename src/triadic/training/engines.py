"""Engines: what one process, DDP, FSDP2 and DeepSpeed's ZeRO do differently, a row of ENGINES each.

Under every engine the parameters, their gradients and the optimizer's moments are float32; bfloat16 comes from autocast
around the forward alone. DeepSpeed's own bf16 mode would cast every parameter, A_log and the decay bias too.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

Moments = dict[str, torch.Tensor]  # exp_avg and exp_avg_sq like the parameter, step a number; all float32


@dataclass(frozen=True)
class Engine:
    """Every rank calls these, for the same parameters in the same order."""

    # (accelerator, model, optimizer) -> both as the engine wraps them
    prepare: Callable[[Accelerator, nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
    # (accelerator, model, is this the step's last micro-batch) -> context of one forward and backward
    micro_batch: Callable[[Accelerator, nn.Module, bool], AbstractContextManager]
    # (accelerator, model, loss): gradients, summed over the step's micro-batches and averaged over ranks
    backward: Callable[[Accelerator, nn.Module, torch.Tensor], None]
    # (accelerator, model, limit) -> norm before clipping; ZeRO takes its step too, unless the norm is not finite
    clip: Callable[[Accelerator, nn.Module, float | None], torch.Tensor]
    # (parameter) -> the whole float32 master weight
    weight: Callable[[nn.Parameter], torch.Tensor]
    # (optimizer, parameter) -> its whole moments, {} before the first step
    moments: Callable[[Any, nn.Parameter], Moments]
    # (optimizer, [(name, parameter)], name -> whole moments)
    load_moments: Callable[[Any, list[tuple[str, nn.Parameter]], Callable[[str], Moments]], None]


def name_of(accelerator: Accelerator) -> str:
    """The engine that the launcher started: a key of ENGINES, or accelerate's name of one that is not supported."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":  # on a CPU accelerate itself would do DDP
        version = os.environ.get("FSDP_VERSION", "1")
        return f"fsdp{version}" if torch.distributed.is_initialized() else "single"
    kinds = {DistributedType.NO: "single", DistributedType.MULTI_GPU: "ddp", DistributedType.MULTI_CPU: "ddp"}
    return kinds.get(accelerator.distributed_type, accelerator.distributed_type.value)


def of(accelerator: Accelerator) -> Engine:
    return ENGINES[name_of(accelerator)]


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, precision: str
) -> tuple[nn.Module, Any]:
    """`model` [float32, on the CPU, the same on every rank] and `optimizer` as the engine of this launch wraps them.

    With `precision` "bf16" the model's forward runs under autocast. Raises RuntimeError if a parameter is not float32.
    """
    if precision == "bf16":
        model.forward = autocast(accelerator, precision)(model.forward)
    prepared, optimizer = of(accelerator).prepare(accelerator, model, optimizer)
    check_float32(((name, p) for name, p in model.named_parameters()), f"under {name_of(accelerator)}")
    return prepared, optimizer


def autocast(accelerator: Accelerator, precision: str) -> torch.autocast:
    """bfloat16 in matrix products over float32 parameters, or nothing for "fp32"."""
    return torch.autocast(accelerator.device.type, torch.bfloat16, enabled=precision == "bf16")


def check_float32(named: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Raise RuntimeError if one of the tensors is not float32."""
    wrong = {name: value.dtype for name, value in named if value.dtype != torch.float32}
    if wrong:
        listed = ", ".join(f"{name} is {dtype}" for name, dtype in list(wrong.items())[:3])
        raise RuntimeError(f"{len(wrong)} tensors are not float32 {where}: {listed}")


# One process, DDP: everything is whole on every rank


def _plain_micro_batch(accelerator, model, last):
    return nullcontext() if last else accelerator.no_sync(model)


def _plain_backward(accelerator, model, loss):
    accelerator.backward(loss)


def _clip(accelerator, model, limit):
    norm = nn.utils.clip_grad_norm_(model.parameters(), torch.inf if limit is None else limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _plain_moments(optimizer, parameter):
    return optimizer.optimizer.state.get(parameter, {})


def _plain_load_moments(optimizer, named, read):
    for name, parameter in named:
        optimizer.optimizer.state[parameter] = {
            key: value.to(parameter.device, copy=True) for key, value in read(name).items()
        }


# FSDP2: each parameter is a DTensor whose rows are split over the ranks. Autocast's bfloat16 copies of the weights live
# until the backward; with model.gradient_checkpointing they do not.


def _shard(accelerator, model, optimizer):
    """One group of parameters per layer, one for the rest; the layers' weights are freed after their forward."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    offloads = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy()}
    frees = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, reshard_after_forward=frees, **options)
    fully_shard(model, reshard_after_forward=frees, **options)
    register_fsdp_forward_method(model, "token_losses")
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[name] for name in group["names"]]
    return model, optimizer


def _fsdp_micro_batch(accelerator, model, last):
    return nullcontext()  # reduced each time: whole gradients kept over micro-batches would undo the sharding


def _fsdp_backward(accelerator, model, loss):
    loss.backward()


def _whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _fsdp_moments(optimizer, parameter):
    return {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}


def _fsdp_load_moments(optimizer, named, read):
    def part(value, parameter):
        if value.shape != parameter.shape:  # the step
            return value.to(parameter.to_local().device, copy=True)
        local = distribute_tensor(
            value.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return local.to(parameter.to_local().device)

    for name, parameter in named:
        optimizer.state[parameter] = {key: part(value, parameter) for key, value in read(name).items()}


# DeepSpeed: ZeRO keeps flat partitions, the optimizer's state is of them


def _zero_prepare(accelerator, model, optimizer):
    """With the states that AdamW makes at its first step: DeepSpeed finds only the first group's in time."""
    model, optimizer = accelerator.prepare(model, optimizer)
    zero = optimizer.optimizer
    for flat in _flat_partitions(zero):
        zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
        zero.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **zeros}
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # ZeRO-1 and 2
        zero._lazy_init_hp_params_optimizer_state()
    return model, optimizer


def _flat_partitions(zero):
    """This rank's parts of the float32 master weights, one-dimensional."""
    return getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups


def _zero_micro_batch(accelerator, model, last):
    model.set_gradient_accumulation_boundary(last)
    return nullcontext()


def _zero_backward(accelerator, model, loss):
    # ZeRO leaves out a step whose gradients are not finite; with this, one whose loss is not finite too
    model.backward(loss * (loss.detach() * 0 + 1))


def _zero_clip(accelerator, model, limit):
    model.step()  # clips to what parallel.start gave it
    return torch.as_tensor(model.get_global_grad_norm(), device=accelerator.device)


def _zero_weight(parameter):
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)


def _zero_moments(optimizer, parameter):
    from deepspeed.utils import safe_get_full_optimizer_state

    step = next(iter(optimizer.optimizer.optimizer.state.values()))["step"]  # of every partition
    return {"step": step, **{key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}}


def _zero_load_moments(optimizer, named, read):
    """Each rank takes its own part of the whole moments."""
    zero = optimizer.optimizer
    for name, parameter in named:
        moments = read(name)
        for key in MOMENTS:
            put = _put_partition if hasattr(parameter, "ds_id") else _put_fragment
            put(parameter, moments[key], key)
    for flat in _flat_partitions(zero):
        zero.optimizer.state[flat]["step"].copy_(moments["step"])


def _put_fragment(parameter, value, key):
    from deepspeed.utils import safe_set_full_optimizer_state

    safe_set_full_optimizer_state(parameter, value, key)


def _put_partition(parameter, value, key):
    """DeepSpeed's own setter of whole tensors fails where the last rank's part is padded."""
    from deepspeed.utils import safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()
    part = value.flatten()[torch.distributed.get_rank() * size :][:size]
    padded = nn.functional.pad(part, (0, size - part.numel()))
    safe_set_local_optimizer_state(parameter, padded.to(parameter.ds_tensor.device), key)


_PLAIN = Engine(
    prepare=lambda accelerator, model, optimizer: accelerator.prepare(model, optimizer),
    micro_batch=_plain_micro_batch,
    backward=_plain_backward,
    clip=_clip,
    weight=lambda parameter: parameter,
    moments=_plain_moments,
    load_moments=_plain_load_moments,
)
_FSDP2 = Engine(_shard, _fsdp_micro_batch, _fsdp_backward, _clip, _whole, _fsdp_moments, _fsdp_load_moments)
_ZERO = Engine(
    _zero_prepare, _zero_micro_batch, _zero_backward, _zero_clip, _zero_weight, _zero_moments, _zero_load_moments
)
ENGINES = {"single": _PLAIN, "ddp": _PLAIN, "fsdp2": _FSDP2, "zero1": _ZERO, "zero2": _ZERO, "zero3": _ZERO}
