"""Triton kernels that normalise channels of ``[B, C, L]``; ``channels.py`` says which when.

A tile is E elements of each of CB channels: P neighbouring places of each of ``E // P`` instances, so
that threads read vectors whatever L is. Tensors that a call has not may be the constant None.
Arithmetic is in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "channel_gradient_sums",
    "channel_gradients",
    "channel_moments",
    "held_channel_gradients",
    "held_channels",
    "instance_statistics",
    "normalize_channels",
]


@triton.jit
def _places(
    tile,
    c,
    count,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where the elements of a tile of channels ``c`` are, and whether they are any."""
    CHUNKS: tl.constexpr = (L + P - 1) // P
    e = tl.arange(0, E)[:, None]
    if WIDE:
        tile = tile.to(tl.int64)
    instance = tile // CHUNKS * (E // P) + e // P
    place = tile % CHUNKS * P + e % P
    inside = (instance < count // L) & (c < C)
    if L % P != 0:
        inside &= place < L
    return (instance * C + c) * L + place, inside


@triton.jit
def _tiles(count, L: tl.constexpr, E: tl.constexpr, P: tl.constexpr):
    """Of a channel."""
    return (L + P - 1) // P * tl.cdiv(count // L, E // P)


@triton.jit
def _begin(DEPENDENT: tl.constexpr):
    """With DEPENDENT a kernel may be launched before the stream's previous one has ended."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _latest_first(blocks):
    """Which block of channels, and which tile of it: in the second of two kernels that sweep the same
    tensors, first what the first has left in the L2 cache last."""
    of_channels = tl.num_programs(0) // blocks
    program = tl.program_id(0)
    return program % of_channels, blocks - 1 - program // of_channels


@triton.jit
def _of_channels(pointer, c, C: tl.constexpr, absent):
    """A number for each channel, ``absent`` where there is no tensor."""
    if pointer is None:
        return tl.zeros(c.shape, tl.float32) + absent
    else:
        return tl.load(pointer + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _store_statistics(
    mean,
    squares,  # about the mean
    old_mean,
    old_var,
    running_mean,
    running_var,
    save_mean,
    save_invstd,
    count,
    eps,
    momentum,
    c,
    mask,
):
    """Store a batch's statistics; give ``1 / sqrt(var + eps)``."""
    number = count.to(tl.float32)
    invstd = tl.rsqrt(tl.div_rn(squares, number) + eps)
    tl.store(save_mean + c, mean, mask=mask)
    tl.store(save_invstd + c, invstd, mask=mask)
    if running_mean is not None:
        unbiased = tl.div_rn(squares, number - 1.0)
        keep = 1.0 - momentum
        tl.store(running_mean + c, keep * old_mean + momentum * mean, mask=mask)
        tl.store(running_var + c, keep * old_var + momentum * unbiased, mask=mask)
    return invstd


@triton.jit
def held_channels(
    x,
    running_mean,
    running_var,
    weight,
    bias,
    y,
    save_mean,
    save_invstd,
    count,
    eps,
    momentum,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Channels of at most E elements, held in registers and read once."""
    _begin(DEPENDENT)
    c = tl.program_id(0) * CB + tl.arange(0, CB)[None, :]
    places, mask = _places(tl.program_id(0) * 0, c, count, C, L, E, P, WIDE)
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    # All that is read is asked for before sums are waited for.
    old_mean = _of_channels(running_mean, c, C, 0.0)
    old_var = _of_channels(running_var, c, C, 0.0)
    weights = _of_channels(weight, c, C, 1.0)
    biases = _of_channels(bias, c, C, 0.0)
    mean = tl.div_rn(tl.sum(values, axis=0)[None, :], count.to(tl.float32))
    values = tl.where(mask, values - mean, 0.0)
    squares = tl.sum(values * values, axis=0)[None, :]
    invstd = _store_statistics(
        mean, squares, old_mean, old_var, running_mean, running_var, save_mean, save_invstd,
        count, eps, momentum, c, c < C,
    )  # fmt: skip
    result = tl.fma(values, invstd * weights, biases)
    tl.store(y + places, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def channel_moments(
    x,
    parts,  # [3, splits, C]: numbers, means, sums of squares about them
    count,
    splits,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Of the elements that a program takes, every so-many-th tile (Welford 1962; the lanes are
    joined as Chan, Golub and LeVeque 1979 do)."""
    _begin(DEPENDENT)
    split = tl.program_id(0) % splits
    c = tl.program_id(0) // splits * CB + tl.arange(0, CB)[None, :]
    mean = tl.zeros([E, CB], tl.float32)
    squares = tl.zeros([E, CB], tl.float32)
    numbers = tl.zeros([E, CB], tl.float32)
    turns = 0.0
    for tile in range(split, _tiles(count, L, E, P), splits):
        places, mask = _places(tile, c, count, C, L, E, P, WIDE)
        values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        turns += 1.0
        numbers += mask.to(tl.float32)
        apart = tl.where(mask, values - mean, 0.0)
        if L <= P or L % P == 0:  # a lane has elements in its first tiles, or in none
            mean += apart * (1.0 / turns)
        else:
            mean += apart * (1.0 / tl.maximum(numbers, 1.0))
        squares += apart * tl.where(mask, values - mean, 0.0)
    number = tl.sum(numbers, axis=0)[None, :]
    joined = tl.div_rn(tl.sum(numbers * mean, axis=0)[None, :], number)
    apart = mean - joined
    squares += tl.where(numbers > 0.0, numbers * apart * apart, 0.0)
    part = split * C + c
    tl.store(parts + part, number, mask=c < C)
    tl.store(parts + splits * C + part, joined, mask=c < C)
    tl.store(parts + 2 * splits * C + part, tl.sum(squares, axis=0)[None, :], mask=c < C)


@triton.jit
def normalize_channels(
    x,
    running_mean,
    running_var,
    weight,
    bias,
    y,
    save_mean,
    save_invstd,
    parts,  # None in evaluation
    count,
    splits,
    blocks,  # programs to a block of channels
    eps,
    momentum,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile to a program, asked for before the parts are."""
    if DEPENDENT:
        gdc_wait()
    POLICY: tl.constexpr = "" if parts is None else "evict_first"
    if parts is None:
        channel, tile = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    else:
        channel, tile = _latest_first(blocks)
    c = channel * CB + tl.arange(0, CB)[None, :]
    places, mask = _places(tile, c, count, C, L, E, P, WIDE)
    values = tl.load(x + places, mask=mask, other=0.0, eviction_policy=POLICY)
    old_mean = _of_channels(running_mean, c, C, 0.0)
    old_var = _of_channels(running_var, c, C, 1.0)
    weights = _of_channels(weight, c, C, 1.0)
    biases = _of_channels(bias, c, C, 0.0)
    if parts is None:
        mean = old_mean
        invstd = tl.rsqrt(old_var + eps)
    else:
        split = tl.arange(0, SPLITS)[:, None]
        part = split * C + c
        there = (split < splits) & (c < C)
        numbers = tl.load(parts + part, mask=there, other=0.0)
        means = tl.load(parts + splits * C + part, mask=there, other=0.0)
        squares = tl.load(parts + 2 * splits * C + part, mask=there, other=0.0)
        number = count.to(tl.float32)
        mean = tl.div_rn(tl.sum(numbers * means, axis=0)[None, :], number)
        apart = tl.where(there, means - mean, 0.0)
        total = tl.sum(squares + numbers * apart * apart, axis=0)[None, :]
        invstd = _store_statistics(
            mean, total, old_mean, old_var, running_mean, running_var, save_mean, save_invstd,
            count, eps, momentum, c, (c < C) & (tile == 0),
        )  # fmt: skip
    scale = invstd * weights
    if DEPENDENT:
        gdc_launch_dependents()
    result = tl.fma(values.to(tl.float32) - mean, scale, biases)
    tl.store(y + places, result.to(y.dtype.element_ty), mask=mask, eviction_policy=POLICY)


@triton.jit
def instance_statistics(
    moments,  # [2, instances, C]: means, and sums of squares about them
    running_mean,
    running_var,
    instances,
    momentum,
    C: tl.constexpr,
    L: tl.constexpr,
    CB: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Running statistics move towards the mean over instances, of the unbiased variance."""
    _begin(DEPENDENT)
    c = tl.program_id(0) * CB + tl.arange(0, CB)[None, :]
    means = tl.zeros([DEPTH, CB], tl.float32)
    squares = tl.zeros([DEPTH, CB], tl.float32)
    for first in range(0, instances, DEPTH):
        instance = first + tl.arange(0, DEPTH)[:, None].to(tl.int64)
        mask = (instance < instances) & (c < C)
        place = instance * C + c
        means += tl.load(moments + place, mask=mask, other=0.0)
        squares += tl.load(moments + instances.to(tl.int64) * C + place, mask=mask, other=0.0)
    number = instances.to(tl.float32)
    mean = tl.div_rn(tl.sum(means, axis=0)[None, :], number)
    var = tl.div_rn(tl.sum(squares, axis=0)[None, :], number * (L - 1))
    keep = 1.0 - momentum
    old_mean = _of_channels(running_mean, c, C, 0.0)
    old_var = _of_channels(running_var, c, C, 0.0)
    tl.store(running_mean + c, keep * old_mean + momentum * mean, mask=c < C)
    tl.store(running_var + c, keep * old_var + momentum * var, mask=c < C)


# --- gradients ----------------------------------------------------------------------------------


@triton.jit
def _read(grad, x, places, mask, mean, invstd):
    """Gradients, and normalised values."""
    grads = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    return grads, tl.where(mask, (values - mean) * invstd, 0.0)


@triton.jit
def _gradient(grads, normal, scale, grad_weight, grad_bias, number):
    return (grads - tl.div_rn(grad_bias, number) - normal * tl.div_rn(grad_weight, number)) * scale


@triton.jit
def held_channel_gradients(
    grad,
    x,
    save_mean,
    save_invstd,
    weight,
    grad_x,
    grad_weight,
    grad_bias,
    count,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Channels of at most E elements, held in registers and read once."""
    _begin(DEPENDENT)
    c = tl.program_id(0) * CB + tl.arange(0, CB)[None, :]
    places, mask = _places(tl.program_id(0) * 0, c, count, C, L, E, P, WIDE)
    invstd = _of_channels(save_invstd, c, C, 1.0)
    grads, normal = _read(grad, x, places, mask, _of_channels(save_mean, c, C, 0.0), invstd)
    of_bias = tl.sum(grads, axis=0)[None, :]
    of_weight = tl.sum(grads * normal, axis=0)[None, :]
    tl.store(grad_bias + c, of_bias, mask=c < C)
    tl.store(grad_weight + c, of_weight, mask=c < C)
    scale = invstd * _of_channels(weight, c, C, 1.0)
    result = _gradient(grads, normal, scale, of_weight, of_bias, count.to(tl.float32))
    tl.store(grad_x + places, result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def channel_gradient_sums(
    grad,
    x,
    save_mean,
    save_invstd,
    parts,  # [2, splits, C]: sums of gradients, and of gradients times normalised values
    count,
    splits,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Of the elements that a program takes, every so-many-th tile."""
    _begin(DEPENDENT)
    split = tl.program_id(0) % splits
    c = tl.program_id(0) // splits * CB + tl.arange(0, CB)[None, :]
    mean = _of_channels(save_mean, c, C, 0.0)
    invstd = _of_channels(save_invstd, c, C, 1.0)
    of_bias = tl.zeros([E, CB], tl.float32)
    of_weight = tl.zeros([E, CB], tl.float32)
    for tile in range(split, _tiles(count, L, E, P), splits):
        places, mask = _places(tile, c, count, C, L, E, P, WIDE)
        grads, normal = _read(grad, x, places, mask, mean, invstd)
        of_bias += grads
        of_weight += grads * normal
    part = split * C + c
    tl.store(parts + part, tl.sum(of_bias, axis=0)[None, :], mask=c < C)
    tl.store(parts + splits * C + part, tl.sum(of_weight, axis=0)[None, :], mask=c < C)


@triton.jit
def channel_gradients(
    grad,
    x,
    save_mean,
    save_invstd,
    weight,
    grad_x,
    grad_weight,
    grad_bias,
    parts,
    count,
    splits,
    blocks,
    C: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile to a program, asked for before the parts are."""
    _begin(DEPENDENT)
    channel, tile = _latest_first(blocks)
    c = channel * CB + tl.arange(0, CB)[None, :]
    places, mask = _places(tile, c, count, C, L, E, P, WIDE)
    grads = tl.load(grad + places, mask=mask, other=0.0, eviction_policy="evict_first")
    values = tl.load(x + places, mask=mask, other=0.0, eviction_policy="evict_first")
    mean = _of_channels(save_mean, c, C, 0.0)
    invstd = _of_channels(save_invstd, c, C, 1.0)
    scale = invstd * _of_channels(weight, c, C, 1.0)
    split = tl.arange(0, SPLITS)[:, None]
    part = split * C + c
    there = (split < splits) & (c < C)
    first = tl.load(parts + part, mask=there, other=0.0)
    second = tl.load(parts + splits * C + part, mask=there, other=0.0)
    of_bias = tl.sum(first, axis=0)[None, :]
    of_weight = tl.sum(second, axis=0)[None, :]
    tl.store(grad_bias + c, of_bias, mask=(c < C) & (tile == 0))
    tl.store(grad_weight + c, of_weight, mask=(c < C) & (tile == 0))
    normal = tl.where(mask, (values.to(tl.float32) - mean) * invstd, 0.0)
    number = count.to(tl.float32)
    result = _gradient(grads.to(tl.float32), normal, scale, of_weight, of_bias, number)
    result = result.to(grad_x.dtype.element_ty)
    tl.store(grad_x + places, result, mask=mask, eviction_policy="evict_first")
