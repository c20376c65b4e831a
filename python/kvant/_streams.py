"""CUDA streams: that of a call, and the order between it and the stream on which a tensor is produced."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any

from . import _arguments
from ._errors import InvalidArgument, KvantError

_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING


def number(stream: Any) -> int:
    """The stream of torch, of CuPy, or a number as a cudaStream_t."""
    for attribute in ("cuda_stream", "ptr"):
        stream = getattr(stream, attribute, stream)
    return _arguments.integer("stream", stream, 0, (1 << 64) - 1)


def of_interface(name: str, stream: Any) -> int | None:
    """`stream` of __cuda_array_interface__: on which the array's data will be ready; None: it is ready."""
    if stream is None:
        return None
    found = _arguments.integer(f"{name}'s stream", stream, 0, (1 << 64) - 1)
    if found == 0:
        raise InvalidArgument(f"{name}'s stream is 0, which __cuda_array_interface__ leaves without a meaning: use 1")
    return found


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def wait(device: int, producer: int, consumer: int) -> None:
    """Makes what is enqueued on `consumer` from now on wait for what `producer` has now. 0 and 1 are both the legacy
    default stream."""
    if (producer or 1) == (consumer or 1):
        return
    driver = _driver()

    def call(function: str, *arguments: Any) -> None:
        status = getattr(driver, function)(*arguments)
        if status != 0:
            raise KvantError(
                f"the stream of the call could not wait for stream {producer}, on which a tensor is produced: "
                f"{function} returned {status}; synchronise that stream before the call"
            )

    unit, context, event = c_int(), c_void_p(), c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", byref(unit), device)
    call("cuDevicePrimaryCtxRetain", byref(context), unit)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuEventCreate", byref(event), c_uint(_UNTIMED))
            try:
                call("cuEventRecord", event, c_void_p(producer))
                call("cuStreamWaitEvent", c_void_p(consumer), event, c_uint(0))
            finally:
                driver.cuEventDestroy_v2(event)
        finally:
            driver.cuCtxPopCurrent_v2(byref(c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(unit)
