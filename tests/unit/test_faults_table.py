"""Every kind that a text can tell, by texts as MLX and the systems below it word them."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from mayfly_protocol.faults import KINDS, TABLE, Kind, classify_text
from mayfly_protocol.lifecycle import Scope

METAL = "[METAL] Command buffer execution failed: "
ORDER = [
    "metal_submissions_ignored",
    "metal_timeout",
    "metal_hang",
    "metal_out_of_memory",
    "metal_interactivity",
    "metal_memory_fault",
    "metal_innocent_victim",
    "metal_other",
    "metal_assert",
    "metal_resource_limit",
    "metal_buffer_size",
    "allocation_failed",
    "metal_objects",
    "metal_init",
    "metal_compile",
    "wired_limit",
    "stream_thread",
    "cuda_sticky",
    "cuda_out_of_memory",
    "cuda_graph_thrash",
    "cuda_graph_poison",
    "cuda_capture",
    "cuda_graph_launch",
    "cuda_library",
    "cuda_compile",
    "cuda_environment",
    "cuda_event",
    "cuda_other",
    "cxx_abort",
    "unsupported",
    "shape",
    "model_load",
    "nonfinite_logits",
    "canary_mismatch",
    "killed_by_system",
    "killed",
    "crashed",
    "aborted",
    "wedged",
    "silent",
    "unknown",
]

TEXTS: dict[str, list[str]] = {
    "metal_submissions_ignored": [
        METAL + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
        METAL + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOAccelCommandBufferCallbackErrorSubmissionsIgnored)",
        METAL + "Ignored (for causing prior/excessive GPU errors)",
    ],
    "metal_timeout": [
        METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
        METAL + "GPU-Zeitüberschreitung (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        METAL + "Caused GPU Timeout Error",
    ],
    "metal_hang": [
        METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
        "RuntimeError: " + METAL + "(kIOGPUCommandBufferCallbackErrorHang)",
    ],
    "metal_out_of_memory": [
        METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        METAL + "Insufficient Memory\n(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ],
    "metal_interactivity": [
        METAL + "Impacting Interactivity "
        "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
        METAL + "Impacting Interactivity",
    ],
    "metal_memory_fault": [
        METAL + "Caused GPU Address Fault Error "
        "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
        METAL + "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource).",
    ],
    "metal_innocent_victim": [
        METAL + "Discarded (victim of GPU error/recovery) "
        "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
        METAL + "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
    ],
    "metal_other": [
        METAL + "Internal Error (0000000f:kIOGPUCommandBufferCallbackErrorSomethingNew).",
        METAL + "Unbekannter Fehler",
    ],
    "metal_assert": [
        "-[AGXG16XFamilyCommandBuffer tryCoalescingPreviousComputeCommandEncoder:]:1091: "
        "failed assertion `A command encoder is already encoding to this command buffer'",
        "-[IOGPUMetalCommandBuffer addCompletedHandler:]:875: failed assertion "
        "'Completed handler provided after commit call'",
    ],
    "metal_resource_limit": [
        "[metal::malloc] Resource limit (499000) exceeded.",
        "RuntimeError: [metal::malloc] Resource limit (8000) exceeded",
    ],
    "metal_buffer_size": [
        "[metal::malloc] Attempting to allocate 21474836480 bytes which is greater than the "
        "maximum allowed buffer size of 17179869184 bytes.",
        "RuntimeError: [metal::malloc] Attempting to allocate 9663676416 bytes which is greater "
        "than the maximum allowed buffer size of 9534832640 bytes.",
    ],
    "allocation_failed": [
        "[malloc] Unable to allocate 1073741824 bytes.",
        "RuntimeError: [malloc] Unable to allocate 68719476736 bytes",
    ],
    "metal_objects": [
        "[Event::Event] Failed to create Metal shared event.",
        "[metal::CommandEncoder] Failed to make new command queue.",
    ],
    "metal_init": [
        "[metal::load_device] No Metal device available.",
        "Failed to load the default metallib. library not found library not found",
        "Failed to load the metallib from </opt/mlx/lib/mlx.metallib>. error",
        "Can not load metallib from specified location </opt/mlx.metallib>",
        "[metal::Device] Unable to construct residency set.",
    ],
    "metal_compile": [
        "[metal::Device] Unable to build metal library from source\n"
        "mlx/backend/metal/kernels/utils.h:520:30: error: no matching function for call",
        "[metal::Device] Unable to load kernel affine_qmv_fast_bfloat16_t_gs_64_b_3_batch_0",
        "[metal::Device] Unable to load function vvn_Addbfloat16bfloat16",
    ],
    "wired_limit": [
        "[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size "
        "is not allowed.",
        "ValueError: [metal::set_wired_limit] Setting a wired limit larger than 98304 MB",
    ],
    "stream_thread": [
        "There is no Stream(gpu, 1) in current thread.",
        "There is no Stream(cpu, 0) in current thread",
        "There is no Stream(gpu, -1) in current thread.",
    ],
    "cuda_sticky": [
        "cudaStreamSynchronize(stream) failed: an illegal memory access was encountered",
        "cudaGraphLaunch(graph_exec, stream) failed: unspecified launch failure",
        "cudaEventSynchronize(event_) failed: the launch timed out and was terminated",
        "cuLaunchKernel(func, ...) failed: misaligned address",
        "cudaFreeAsync(ptr, stream) failed: uncorrectable ECC error encountered",
        "cudaMemcpyAsync(dst, src, n, kind, s) failed: Invalid access of peer GPU memory over "
        "nvlink or a hardware error",
    ],
    "cuda_out_of_memory": [
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "cuMemCreate(&handle, bytes, &prop, 0) failed: out of memory.",
        "cudaGraphInstantiate(&graph_exec, graph, nullptr, nullptr, 0) failed: out of memory",
    ],
    "cuda_graph_thrash": [
        "Cache thrashing is happening, please set the environment variable "
        "MLX_CUDA_GRAPH_CACHE_SIZE to a larger value than 400 to fix degraded performance.",
        "RuntimeError: Cache thrashing is happening, please set the environment variable "
        "MLX_CUDA_SDPA_CACHE_SIZE to a larger value than 256 to fix degraded performance.",
    ],
    "cuda_graph_poison": [
        "cudaGraphAddDependencies( graph_, from.data(), to.data(), nullptr, from.size()) "
        "failed: invalid argument",
        "RuntimeError: cudaGraphAddDependencies(graph, &a, &b, 1) failed: invalid argument.",
    ],
    "cuda_capture": [
        "cudaStreamEndCapture(enc.stream(), &graph) failed: operation failed due to a previous "
        "error during capture",
        "cudaStreamBeginCapture( enc.stream(), cudaStreamCaptureModeGlobal) failed: invalid "
        "argument",
    ],
    "cuda_graph_launch": [
        "cudaGraphAddKernelNode(&node, graph_, nullptr, 0, &params) failed: invalid argument",
        "cuGraphAddKernelNode(&node, graph_, NULL, 0, &params) failed: invalid argument",
        "cudaGraphLaunch(graph_exec, stream_) failed: invalid argument",
        "cudaGraphExecUpdate(graph_exec, graph_, &update_result) failed: the graph update was "
        "not performed because it included changes which violated constraints",
        "cudaLaunchKernelExC(&config, func, params) failed: invalid configuration argument",
        "cudaGraphKernelNodeSetAttribute(node, attr, &value) failed: invalid argument",
    ],
    "cuda_library": [
        "cublasLtMatmul( handle, desc, alpha, a, a_desc) failed with code: 14.",
        "cudnnBackendFinalize(plan) failed: CUDNN_STATUS_NOT_SUPPORTED",
        "cufftExecR2C(plan, in, out) failed with code: 6.",
        "Can not find algorithm for matmul.",
    ],
    "cuda_compile": [
        "Failed to compile kernel: steel.cu(12): error: identifier undefined.",
        "Failed to load compiled CompiledAddMultiply kernel: ptxas fatal : Unresolved extern.",
        "There is no kernel named mlx::core::cu::gather<float, int>.",
        "nvrtcCreateProgram(&prog, source, name, 0, nullptr, nullptr) failed: "
        "NVRTC_ERROR_OUT_OF_MEMORY",
        "Can not find locations of CUDA headers, please set environment variable CUDA_HOME or "
        "CUDA_PATH.",
    ],
    "cuda_environment": [
        "cudaGetDeviceCount(&n) failed: no CUDA-capable device is detected",
        "cudaGetDevice(&d) failed: CUDA driver version is insufficient for CUDA runtime version",
        "cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) failed: CUDA-capable "
        "device(s) is/are busy or unavailable",
        "cudaFuncSetAttribute(f, a, 1) failed: no kernel image is available for execution on the "
        "device",
    ],
    "cuda_event": [
        "Should not wait on a CudaEvent before recording.",
        "CudaEvent can not wait on CPU stream.",
    ],
    "cuda_other": [
        "cudaSetDevice(device_) failed: invalid device ordinal",
        "cuModuleGetFunction(&kernel, module_, mangled.c_str()) failed: named symbol not found",
    ],
    "cxx_abort": [
        "libc++abi: terminating due to uncaught exception of type std::logic_error: basic_string",
        "terminate called after throwing an instance of 'std::system_error'\n"
        "  what():  Resource temporarily unavailable",
        "terminate called without an active exception",
    ],
    "unsupported": [
        "SVD has no GPU implementation.",
        "BlockMaskedMM has no CUDA implementation.",
        "[quantized_matmul] No implementation for problem shape: 1x4096x128x1",
        "Unsupported dtype complex64 in cuda_type",
    ],
    "shape": [
        "[broadcast_shapes] Shapes (2,3) and (4) cannot be broadcast.",
        "[concatenate] All the input array dimensions must match exactly except for the "
        "concatenation axis.",
        "[matmul] Last dimension of first input with shape (2,3) must match second to last "
        "dimension of second input with shape (4,1).",
        "[take] Cannot do a non-empty take from an empty axis.",
        "Cannot broadcast array of shape (2,3) into shape (4).",
    ],
    "model_load": [
        "[load_safetensors] Failed to open file /models/tiny/model.safetensors",
        "[load_safetensors] The JSON header is 16 bytes long but the file is only 10 bytes. "
        "Perhaps an incomplete download or corrupt file?",
        "[load_gguf] Failed to open /models/tiny.gguf",
        "[read] Unable to read 4096 bytes from file.",
    ],
    "nonfinite_logits": [
        "the logits of 1 row(s) are not finite, or all equal",
        "NonFiniteLogits: the logits of 12 row(s) are not finite, or all equal",
    ],
    "canary_mismatch": [
        "canary mismatch: expected the tokens 5 9 2, got 5 9 7",
        "CanaryMismatch: canary mismatch: the logits are constant",
    ],
    "killed_by_system": [
        "Out of memory: Killed process 4242 (python) total-vm:9112kB, anon-rss:8123kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4242",
        "Memory cgroup out of memory: Killed process 4242 (python)",
        "kernel: memorystatus: killing_top_process pid 4242 [python3.11] (vm-pageshortage)",
    ],
    "crashed": [
        "Fatal Python error: Segmentation fault",
        "Fatal Python error: Bus error",
        "Fatal Python error: Illegal instruction",
    ],
    "aborted": [
        "Fatal Python error: Aborted",
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):",
    ],
    "wedged": [
        "Timeout (0:01:00)!",
        "Timeout (0:00:22.500000)!\nThread 0x00007f2 (most recent call first):",
    ],
}
SILENT = {"killed", "silent", "unknown"}
"""Kinds that no text tells."""


def test_the_table_has_all_kinds_in_their_order() -> None:
    assert [kind.name for kind in TABLE] == ORDER


def test_names_are_unique() -> None:
    assert len(KINDS) == len(TABLE) + 6


def test_every_kind_is_told_by_two_texts_at_least_or_by_none() -> None:
    told = {kind.name for kind in TABLE if kind.signature is not None}
    assert told == set(ORDER) - SILENT == set(TEXTS)
    assert all(len(set(texts)) >= 2 for texts in TEXTS.values())


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts]
)
def test_a_text_is_of_its_kind(name: str, text: str) -> None:
    verdict = classify_text(text)
    assert (verdict.kind, verdict.scope, verdict.strike) == (
        name,
        KINDS[name].scope,
        KINDS[name].strike,
    )
    assert verdict.signature
    assert verdict.signature in text


@pytest.mark.parametrize("text", [text for texts in TEXTS.values() for text in texts])
def test_the_final_dot_does_not_matter(text: str) -> None:
    assert classify_text(text.removesuffix(".")).kind == classify_text(text).kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'model'",
        "division by zero",
        "the METAL command buffer failed",
        "pip install 'mlx-lm[full]' failed",
        "1 request(s) failed: out of memory budget",
        "ConnectionError: Timeout (5 s) while reading",
        "[take_along_axis] Indices of dimension 2 does not match array of dimension 3.",
    ],
)
def test_what_no_row_names_is_unknown_and_costs_the_worker(text: str) -> None:
    verdict = classify_text(text)
    assert (verdict.kind, verdict.scope, verdict.signature) == ("unknown", "worker", "")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_is_written_for_people(kind: Kind) -> None:
    assert kind.scope in get_args(Scope)
    for text in (kind.meaning, kind.reaction, kind.advice):
        assert re.fullmatch(r"([A-Z]|macOS).*[.]", text), f"{kind.name}: no sentence: {text!r}"


def test_few_kinds_are_never_the_first_of_their_process() -> None:
    assert {kind.name for kind in TABLE if kind.follows} == {
        "metal_submissions_ignored",
        "cuda_graph_poison",
        "cuda_capture",
    }


@pytest.mark.parametrize(
    "name", ["metal_innocent_victim", "killed", "stream_thread", "cuda_environment"]
)
def test_no_request_is_blamed_for_what_is_not_its_doing(name: str) -> None:
    assert KINDS[name].strike == "none"


@pytest.mark.parametrize(
    "name", ["metal_memory_fault", "cuda_graph_launch", "crashed", "killed_by_system"]
)
def test_requests_are_suspected_where_their_shapes_may_have_done_it(name: str) -> None:
    assert KINDS[name].strike == "suspects"
