"""Texts of each kind of fault, as MLX and the systems below it write them to a log.

The texts are for readers of the manual; faults are recognised by the fault table's signatures
(regular expressions) only.
"""

from __future__ import annotations

_METAL = "[METAL] Command buffer execution failed: "

EXAMPLES: dict[str, list[str]] = {
    "metal_submissions_ignored": [
        _METAL + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
        _METAL + "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOAccelCommandBufferCallbackErrorSubmissionsIgnored)",
        _METAL + "Ignored (for causing prior/excessive GPU errors)",
    ],
    "metal_timeout": [
        _METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
        _METAL + "GPU-Zeitüberschreitung (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        _METAL + "Caused GPU Timeout Error",
    ],
    "metal_hang": [
        _METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
        "RuntimeError: " + _METAL + "(kIOGPUCommandBufferCallbackErrorHang)",
    ],
    "metal_out_of_memory": [
        _METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        _METAL + "Insufficient Memory\n(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ],
    "metal_interactivity": [
        _METAL + "Impacting Interactivity "
        "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
        _METAL + "Impacting Interactivity",
    ],
    "metal_memory_fault": [
        _METAL + "Caused GPU Address Fault Error "
        "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
        _METAL + "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource).",
    ],
    "metal_innocent_victim": [
        _METAL + "Discarded (victim of GPU error/recovery) "
        "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
        _METAL + "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
    ],
    "metal_other": [
        _METAL + "Internal Error (0000000f:kIOGPUCommandBufferCallbackErrorSomethingNew).",
        _METAL + "Unbekannter Fehler",
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
"""Example texts by the name of a kind of fault, the most common text first; kinds that are not
recognised by a text have none."""
