"""Linear layers of few rows and attention over a cache, on every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from polyaccel.errors import InvariantError
from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_ATTENTION, DECODE_GROUPED, DECODE_LINEAR, DECODE_OPS
from polyaccel.ops.torch.decode import decode_kernels
from polyaccel.torch.generation.decode.cache import PagedCache
from polyaccel.torch.weight_groups import GroupedWeight

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def table(isa: str) -> KernelTable:
    return decode_kernels()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(inputs, outputs, dtype, *, by_inputs):
    torch.manual_seed(inputs + outputs)
    weight = torch.randn(inputs, outputs).t() if by_inputs else torch.randn(outputs, inputs)
    return weight.to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 70), (64, 96), (31, 7), (130, 2100)], ids=str)
def test_a_linear_layer_is_that_of_float64_and_a_row_depends_on_no_other(table, inputs, outputs, dtype, by_inputs):
    weight, bias = layer(inputs, outputs, dtype, by_inputs=by_inputs)
    for given in (bias, None):
        call = table[DECODE_LINEAR](weight, given)
        for rows in (1, 2, 4, 5, 13):
            x = torch.randn(rows, inputs).to(dtype)
            found = call(x)
            wanted = x.double() @ weight.double().T + (0 if given is None else bias.double())
            bound = TOLERANCE[dtype] * (1 + wanted.abs().max())
            assert (found.double() - wanted).abs().max() <= bound
            for row in range(rows):
                assert torch.equal(call(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "size"), [(1, 1, 1), (33, 70, 5), (130, 200, 64), (600, 33, 600), (96, 16, 128)], ids=str
)
def test_grouped_weights_are_those_of_float64_and_a_row_depends_on_no_other(table, inputs, outputs, size, dtype, bits):
    torch.manual_seed(inputs)
    grouped = GroupedWeight(torch.randn(outputs, inputs), size, bits=bits)
    weight, bias = grouped.weight().double(), torch.randn(outputs).to(dtype)
    for given in (bias, None):
        call = table[DECODE_GROUPED](grouped.packed, given)
        for rows in (1, 2, 5, 17, 100):
            x = torch.randn(rows, inputs).to(dtype)
            found = call(x)
            wanted = x.double() @ weight.T + (0 if given is None else bias.double())
            bound = max(TOLERANCE[dtype], 2e-4) * (1 + wanted.abs().max())  # inputs are rounded to 16 bits
            assert (found.double() - wanted).abs().max() <= bound
            for row in range(0, rows, 7):
                assert torch.equal(call(x[row : row + 1])[0], found[row])


def test_grouped_rows_have_the_same_bits_by_threads_strides_and_types(table, threads):
    grouped = GroupedWeight(torch.randn(300, 40), 16, bits=4)
    call, x = table[DECODE_GROUPED](grouped.packed, None), torch.randn(5, 80).half()
    x[1], x[2, 0], x[3, 1] = 0, float("inf"), float("nan")
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found += [call(x[:, :40].float()), call(x[:, :40].float().contiguous()), call(x.float()[:, :40])]
    assert all(torch.equal(one.nan_to_num(7), found[0].nan_to_num(7)) for one in found)
    assert found[0][2:4].isnan().all()
    assert (found[0][1] == 0).all()
    assert not found[0][4].isnan().any()
    assert torch.equal(call(x[:, :40])[4], found[0][4].half())


def test_threads_and_strides_change_no_bit(table, threads):
    weight, bias = layer(40, 500, torch.float32, by_inputs=False)
    call, x = table[DECODE_LINEAR](weight, bias), torch.randn(3, 80)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found += [call(x[:, :40]), call(x[:, :40].contiguous())]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("by_inputs", [False, True])
def test_many_rows_are_those_of_float64_with_and_without_onednn(table, by_inputs, monkeypatch):
    weight, bias = layer(33, 70, torch.float32, by_inputs=by_inputs)
    x = torch.randn(100, 66)[:, ::2]
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    for enabled in (True, False):
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda enabled=enabled: enabled)
        torch.testing.assert_close(table[DECODE_LINEAR](weight, bias)(x).double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_kernels_do_not_know_is_left_to_torch(table):
    weight, bias = layer(6, 5, torch.float64, by_inputs=False)
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(table[DECODE_LINEAR](weight, bias)(x), functional.linear(x, weight, bias))
    assert set(table) == set(DECODE_OPS)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "head", "rotated"),
    [(4, 4, 8, 8), (3, 1, 6, 6), (6, 2, 40, 0), (2, 1, 70, 20), (1, 1, 13, 10)],
)
def test_attention_writes_pages_and_is_that_of_float64(table, heads, key_heads, head, rotated, dtype, tokens):
    torch.manual_seed(head)
    slots, capacity = 3, 9
    keys, values = (torch.randn(slots, key_heads, capacity, head).to(dtype) for _ in "kv")
    angles = torch.rand(capacity, rotated // 2).repeat(1, 2)
    turns = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
    cache = PagedCache((2, key_heads, head), slots, capacity, dtype, tokens=tokens)
    for slot, length in ((1, 4), (0, capacity), (2, capacity)):
        cache.extend(slot, length)
        cache.write(1, slot, keys[slot, :, :length], values[slot, :, :length])
    attend = table[DECODE_ATTENTION](cache.layer(1), turns, heads, 0.3)
    q, k, v = (torch.randn(2, count, head).to(dtype) for count in (heads, key_heads, key_heads))
    used, positions = torch.tensor([2, 0]), torch.tensor([8, 3])
    found = attend(q, k, v, used, positions).double().view(2, heads, head)

    def turn(x, position):
        if turns is None:
            return x.double()
        half, first = rotated // 2, x[..., :rotated].double()
        other = torch.cat((-first[..., half:], first[..., :half]), dim=-1)
        cosines, sines = (one[position].double() for one in turns)
        return torch.cat((first * cosines + other * sines, x[..., rotated:].double()), dim=-1)

    for row, (slot, position) in enumerate(zip(used.tolist(), positions.tolist(), strict=True)):
        past = keys[slot, :, :position].double(), values[slot, :, :position].double()
        key = torch.cat((past[0], turn(k[row], position)[:, None]), dim=1)
        value = torch.cat((past[1], v[row].double()[:, None]), dim=1)
        for at in range(heads):
            group = at // (heads // key_heads)
            shares = (key[group] @ turn(q[row, at], position) * 0.3).softmax(0)
            assert (found[row, at] - shares @ value[group]).abs().max() <= 4 * TOLERANCE[dtype]
        written = of_slot(cache, slot)
        assert torch.equal(written[1][:, position], v[row])
        assert (written[0][:, position].double() - turn(k[row], position)).abs().max() <= 4 * TOLERANCE[dtype]
        assert torch.equal(written[0][:, position + 1 : capacity], keys[slot, :, position + 1 :])
    assert torch.equal(of_slot(cache, 1)[0][:, :4], keys[1, :, :4])


def of_slot(cache, slot):
    """The keys and values of the second layer."""
    return torch.cat([page[1] for page in cache._held[slot]], dim=2)


def test_pages_are_handed_on_and_those_that_are_missing_are_refused(table):
    cache = PagedCache((1, 1, 8), 2, 12, torch.float32, tokens=4)
    cache.extend(0, 9)
    first, taken = cache.nbytes, set(cache.layer(0).table[0].tolist())
    cache.release(0)
    cache.extend(1, 12)
    assert (cache.nbytes, set(cache.layer(0).table[1].tolist())) == (first, taken)
    attend, x = table[DECODE_ATTENTION](cache.layer(0), None, 1, 1.0), torch.randn(1, 1, 8)
    attend(x, x, x, torch.tensor([1]), torch.tensor([11]))
    for slot, position in ((0, 0), (1, 12), (1, -1)):
        with pytest.raises(InvariantError):
            attend(x, x, x, torch.tensor([slot]), torch.tensor([position]))
