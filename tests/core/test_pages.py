"""Large pages for large buffers."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labo.fused import pages


@pytest.fixture
def requests(monkeypatch):
    found = []
    monkeypatch.setattr(pages, "_MADVISE", lambda *arguments: found.append(arguments))
    return found


def test_whole_pages_inside_a_large_buffer_are_requested(requests):
    x = torch.empty(9 << 20, dtype=torch.uint8)
    assert pages.on_large_pages(x) is x
    [(start, size, advice)] = requests
    assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert x.data_ptr() <= start
    assert start + size <= x.data_ptr() + x.nbytes
    assert size > x.nbytes - 2 * mmap.PAGESIZE
    assert advice == mmap.MADV_HUGEPAGE


def test_small_and_fake_tensors_are_left_alone(requests):
    pages.on_large_pages(torch.empty(1000))
    with FakeTensorMode():
        pages.on_large_pages(torch.empty(9 << 20))
    assert not requests


def test_the_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("LABO_HUGE_PAGES", "0")
    assert pages._find_madvise() is None
