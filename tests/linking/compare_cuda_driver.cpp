// Compares csrc/host/cuda_driver.h with CUDA's own header at compile time.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

#include "cuda_driver.h"

namespace driver = kccl::driver;

template <class T>
concept Complete = requires { sizeof(T); };

// Whether our type can replace theirs. A number can replace a number or a handle of its size. A
// pointer can replace a pointer if what they point to has the same size.
template <class Ours, class Theirs>
constexpr bool stands_for() {
    if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
        using What = std::remove_pointer_t<Ours>;
        using Their = std::remove_pointer_t<Theirs>;
        if constexpr (std::is_void_v<What> || std::is_void_v<Their>) {
            return std::is_void_v<What> && std::is_void_v<Their>;
        } else if constexpr (Complete<Their>) {
            return sizeof(What) == sizeof(Their);
        } else {
            return false;
        }
    } else if constexpr (std::is_pointer_v<Theirs>) {
        return sizeof(Ours) == sizeof(Theirs) && !Complete<std::remove_pointer_t<Theirs>>;
    } else {
        return !std::is_pointer_v<Ours> && sizeof(Ours) == sizeof(Theirs);
    }
}

template <class Ours, class Theirs>
struct Same : std::false_type {};
template <class... Ours, class... Theirs>
    requires(sizeof...(Ours) == sizeof...(Theirs))
struct Same<int (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<(stands_for<Ours, Theirs>() && ...)> {};

static_assert(Same<driver::PushContext, PFN_cuCtxPushCurrent_v4000>::value);
static_assert(Same<driver::PopContext, PFN_cuCtxPopCurrent_v4000>::value);
static_assert(Same<driver::Launch, PFN_cuLaunchKernel_v4000>::value);
static_assert(Same<driver::LaunchEx, PFN_cuLaunchKernelEx_v11060>::value);
static_assert(Same<driver::LaunchGraph, PFN_cuGraphLaunch_v10000>::value);
static_assert(Same<driver::IsCapturing, PFN_cuStreamIsCapturing_v10000>::value);
static_assert(Same<driver::CaptureInfo, PFN_cuStreamGetCaptureInfo_v12030>::value);
static_assert(Same<driver::NodeType, PFN_cuGraphNodeGetType_v10000>::value);
static_assert(Same<driver::GetParams, PFN_cuGraphKernelNodeGetParams_v12000>::value);
static_assert(Same<driver::SetParams, PFN_cuGraphKernelNodeSetParams_v12000>::value);
static_assert(Same<driver::FunctionName, PFN_cuFuncGetName_v12030>::value);

static_assert(driver::kNotCaptured == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(driver::kCaptured == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(driver::kKernelNode == CU_GRAPH_NODE_TYPE_KERNEL);
static_assert(driver::kStreamSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

#define KCCL_SAME_PLACE(ours, a, theirs, b) \
    static_assert(offsetof(ours, a) == offsetof(theirs, b) && sizeof(ours::a) == sizeof(theirs::b))

using KernelNode = driver::KernelNode;
static_assert(sizeof(KernelNode) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2));
static_assert(alignof(KernelNode) == alignof(CUDA_KERNEL_NODE_PARAMS_v2));
KCCL_SAME_PLACE(KernelNode, function, CUDA_KERNEL_NODE_PARAMS_v2, func);
static_assert(offsetof(KernelNode, grid) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, gridDimX));
static_assert(offsetof(KernelNode, block) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, blockDimX));
KCCL_SAME_PLACE(KernelNode, shared_bytes, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
KCCL_SAME_PLACE(KernelNode, parameters, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
KCCL_SAME_PLACE(KernelNode, extra, CUDA_KERNEL_NODE_PARAMS_v2, extra);
KCCL_SAME_PLACE(KernelNode, kernel, CUDA_KERNEL_NODE_PARAMS_v2, kern);
KCCL_SAME_PLACE(KernelNode, context, CUDA_KERNEL_NODE_PARAMS_v2, ctx);

using Attribute = driver::LaunchAttribute;
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));
static_assert(alignof(Attribute) == alignof(CUlaunchAttribute));
KCCL_SAME_PLACE(Attribute, id, CUlaunchAttribute, id);
static_assert(offsetof(Attribute, value) ==
              offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));
static_assert(sizeof(Attribute::value) ==
              sizeof(CUlaunchAttributeValue::programmaticStreamSerializationAllowed));

using Config = driver::LaunchConfig;
static_assert(sizeof(Config) == sizeof(CUlaunchConfig));
static_assert(alignof(Config) == alignof(CUlaunchConfig));
static_assert(offsetof(Config, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(Config, block) == offsetof(CUlaunchConfig, blockDimX));
KCCL_SAME_PLACE(Config, shared_bytes, CUlaunchConfig, sharedMemBytes);
KCCL_SAME_PLACE(Config, stream, CUlaunchConfig, hStream);
KCCL_SAME_PLACE(Config, attributes, CUlaunchConfig, attrs);
KCCL_SAME_PLACE(Config, num_attributes, CUlaunchConfig, numAttrs);
