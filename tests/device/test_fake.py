"""The fake device is unlike the CPU where accelerators are: else the tests in this folder would mean nothing."""

import os
import signal

import pytest
import torch


def test_torch_names_it(fake):
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("fake")
    assert torch.zeros(1, device="fake").device == torch.device("fake", 0)


def test_fresh_memory_is_full_of_nan(fake):
    x = torch.ones(300, device="fake")
    del x
    assert torch.empty(300, device="fake").cpu().isnan().all()


def test_the_cpu_cannot_touch_its_memory(fake):
    """numpy would read it through the pointer: the process ends."""
    x = torch.ones(4, device="fake")
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        import ctypes

        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def test_other_devices_tensors_and_generators_are_refused(fake):
    x = torch.ones(4, device="fake")
    with pytest.raises(RuntimeError, match=r"(?i)expected all tensors .*, fake:0 and cpu"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match=r"(?i)expected all tensors"):
        x + torch.ones(4, device="fake:1")
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="fake", generator=torch.Generator())


def test_generators_draw_other_numbers(fake):
    torch.manual_seed(3)
    drawn = torch.rand(4, device="fake").cpu()
    torch.manual_seed(3)
    assert not torch.equal(drawn, torch.rand(4))
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, device="fake").cpu())


def test_float64_can_be_missing(fake):
    assert torch.ones(1, device="fake").double().dtype == torch.float64
    fake.device.set_float64(False)
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(1, device="fake").double()


def test_a_full_device_is_an_error(fake):
    fake.device.set_limit(1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="fake out of memory"):
        torch.empty(1 << 20, device="fake")


def test_launches_copies_and_synchronizations_are_counted(fake):
    x, other = torch.ones(8, device="fake"), torch.ones(8)
    fake.reset()
    y = (x[2:].view(2, 3).T + 1).mul_(2)  # views launch nothing
    torch._foreach_add_([x, y], 1.0)
    assert fake.launches() == 3
    (
        float(y.sum()),
        y.cpu(),
        y.copy_(other[2:].view(3, 2)),
        torch.nonzero(x),
        other.pin_memory().to("fake", non_blocking=True),
    )
    assert (fake.count("sync"), fake.count("h2d pageable"), fake.count("h2d pinned")) == (3, 1, 1)
    assert fake.where("sync")[0].split(" ")[1:2] == ["sync"]
