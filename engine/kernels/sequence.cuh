// The sequence of a model's ops. Python writes it once (engine/monokernel/sequence.py), from the
// program. All roles walk through it: the consumer warps, the producer warp, which copies weights,
// the packer, and both kinds of warps in prefill.
//
// S has it as constants:
//
//     enum class Vector, Product    the vectors; and the products, numbered in the order of the
//                                   program: those of a layer, and the head behind the last layer
//     kLayer[kNumOps]               the ops of a layer, in the order of the program
//     kNumProducts, kNumModules     how many products and modules a layer has
//     kHeadTiles                    most row tiles of the head whose sums a block holds
//     Products<D>                   a layer's products: Matrices<...> (shape.cuh) of types in D
//
// What follows from the table is computed by the compiler. At run time there is no table. Python
// also defines a macro before all headers: KCCL_OF_PRODUCTS(CASE) expands to CASE(name) for each
// product of a layer, and so makes switches. Compilers make better code of a switch than of a chain
// of comparisons: with a chain, the loops of products (product.cuh) have more instructions.
#pragma once

#include "device.cuh"

namespace kccl::decode {

template <class S>
using Product = typename S::Product;
template <class S>
using Vector = typename S::Vector;

// An op of a layer: the product that it multiplies, the vector that it takes, and the one it gives.
template <class VECTOR, class PRODUCT>
struct Op {
    PRODUCT product;  // kNone: the op multiplies nothing
    VECTOR takes;
    VECTOR gives;
    bool has_bias;
};

// ---- Questions to the table ---------------------------------------------------------------------

// Returns the number, within the layer, of the op with a product.
template <class S>
KCCL_CONSTEXPR uint32_t op_of(Product<S> product) {
    uint32_t op = 0;
    while (S::kLayer[op].product != product) ++op;
    return op;
}

// Returns which products of a layer take a vector: bit i is set if product i does. that_give() and
// that_have_biases() return the same for those that give a vector, or have biases.
template <class S>
KCCL_CONSTEXPR uint32_t that_take(Vector<S> vector) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < S::kNumProducts; ++i) {
        const auto& op = S::kLayer[op_of<S>(static_cast<Product<S>>(i))];
        if (op.takes == vector) bits |= 1u << i;
    }
    return bits;
}
template <class S>
KCCL_CONSTEXPR uint32_t that_give(Vector<S> vector) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < S::kNumProducts; ++i) {
        const auto& op = S::kLayer[op_of<S>(static_cast<Product<S>>(i))];
        if (op.gives == vector) bits |= 1u << i;
    }
    return bits;
}
template <class S>
KCCL_CONSTEXPR uint32_t that_have_biases() {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < S::kNumProducts; ++i) {
        if (S::kLayer[op_of<S>(static_cast<Product<S>>(i))].has_bias) bits |= 1u << i;
    }
    return bits;
}

// Bit i is set if product i of a layer has a matrix for each expert.
template <class S>
KCCL_CONSTEXPR uint32_t that_have_experts() {
    if constexpr (S::kHasExperts) {
        return 1u << static_cast<uint32_t>(Product<S>::kExpertGateUp) |
               1u << static_cast<uint32_t>(Product<S>::kExpertDown);
    } else {
        return 0;
    }
}

// Returns the number of the op that ends a layer's module: the one that gives the residual.
template <class S>
KCCL_CONSTEXPR uint32_t end_of_module(uint32_t module) {
    uint32_t op = 0;
    for (;; ++op) {
        if (S::kLayer[op].gives == Vector<S>::kResidual && module-- == 0) return op;
    }
}
// Returns the number, within the layer, of the module that an op belongs to.
template <class S>
KCCL_CONSTEXPR uint32_t module_of_op(uint32_t op) {
    uint32_t module = 0;
    for (uint32_t i = 0; i < op; ++i) module += S::kLayer[i].gives == Vector<S>::kResidual ? 1 : 0;
    return module;
}
// Returns the product of op `op` or, if it has none, of the next op that has one. Behind the
// layer's last product comes the first one of the next layer.
template <class S>
KCCL_CONSTEXPR Product<S> next_product(uint32_t op) {
    while (op < S::kNumOps && S::kLayer[op].product == Product<S>::kNone) ++op;
    return op < S::kNumOps ? S::kLayer[op].product : Product<S>{};
}

// Tells whether all modules of a layer have equally many products.
template <class S>
KCCL_CONSTEXPR bool have_equal_modules() {
    constexpr uint32_t kEach = S::kNumProducts / S::kNumModules;
    uint32_t ends = 0;
    for (uint32_t module = 1; module <= S::kNumModules; ++module)
        ends |= 1u << (module * kEach - 1);
    return ends == that_give<S>(Vector<S>::kResidual) && kEach * S::kNumModules == S::kNumProducts;
}

// Tells whether bit number `product` of BITS is set. It compares with each number, so that the
// compiler can fold the comparisons.
template <uint32_t BITS, class PRODUCT, uint32_t I = 0>
KCCL_CONSTEXPR bool is_one_of(PRODUCT product) {
    if constexpr (BITS >> I == 0) {
        return false;
    } else {
        return ((BITS >> I & 1u) != 0 && product == static_cast<PRODUCT>(I)) ||
               is_one_of<BITS, PRODUCT, I + 1>(product);
    }
}

// Checks what decode and prefill assume of the ops without a product: the only such op is
// attention, right behind the product that gives the heads.
template <class S>
KCCL_CONSTEXPR bool has_only_attention_between() {
    for (uint32_t op = 0; op < S::kNumOps; ++op) {
        if (S::kLayer[op].product != Product<S>::kNone) continue;
        if (op == 0 || S::kLayer[op - 1].gives != Vector<S>::kHeads) return false;
        if (S::kLayer[op].takes != Vector<S>::kHeads) return false;
        if (S::kLayer[op].gives != Vector<S>::kAttended) return false;
    }
    return true;
}

// ---- Walking ------------------------------------------------------------------------------------

// One product of a token step: its layer, its module, and which of the layer's products it is.
template <class S>
struct Turn {
    uint32_t layer;
    uint32_t module;  // counted over all layers
    Product<S> product;
};
template <class S>
constexpr uint32_t kTurnsOfLayers = S::kNumProducts * S::kNumLayers;

// Returns the i-th product of a token step. The head, which comes behind those of all layers, is
// not counted.
template <class S>
KCCL_CONSTEXPR Turn<S> turn_at(uint32_t i) {
    const uint32_t layer = i / S::kNumProducts, number = i % S::kNumProducts;
    uint32_t module = i / (S::kNumProducts / S::kNumModules);
    if constexpr (!have_equal_modules<S>()) {
        // As a constant: else a compiler may leave the table in memory, and load it here.
        constexpr uint32_t kEnds = that_give<S>(Vector<S>::kResidual);
        module = layer * S::kNumModules;
        KCCL_UNROLL
        for (uint32_t k = 0; k + 1 < S::kNumProducts; ++k) {
            module += (kEnds >> k & 1u) != 0 && number > k ? 1 : 0;
        }
    }
    return {layer, module, static_cast<Product<S>>(number)};
}

// Tells whether a product of a layer takes, or gives, a vector.
template <class S, Vector<S> VECTOR>
KCCL_CONSTEXPR bool takes(Product<S> product) {
    return is_one_of<that_take<S>(VECTOR)>(product);
}
template <class S, Vector<S> VECTOR>
KCCL_CONSTEXPR bool gives(Product<S> product) {
    return is_one_of<that_give<S>(VECTOR)>(product);
}

// op_of_module() returns the op that ends a layer's module, last_of_module() that op's product.
// `module` counts within the layer.
template <class S, uint32_t MODULE = 0>
KCCL_CONSTEXPR uint32_t op_of_module(uint32_t module) {
    if constexpr (MODULE + 1 < S::kNumModules) {
        if (module != MODULE) return op_of_module<S, MODULE + 1>(module);
    }
    constexpr uint32_t kOp = end_of_module<S>(MODULE);
    return kOp;
}
template <class S, uint32_t MODULE = 0>
KCCL_CONSTEXPR Product<S> last_of_module(uint32_t module) {
    if constexpr (MODULE + 1 < S::kNumModules) {
        if (module != MODULE) return last_of_module<S, MODULE + 1>(module);
    }
    constexpr Product<S> kLast = S::kLayer[end_of_module<S>(MODULE)].product;
    return kLast;
}

// Returns the rule by which a layer's module adds to the residual (KcclDecodeModule). `module`
// counts within the layer.
template <class S, uint32_t MODULE = 0, class Layer>
KCCL_DECODE const auto* rule_of_module(const Layer& layer, uint32_t module) {
    static_assert(sizeof(layer.modules) == S::kNumModules * sizeof(layer.modules[0]),
                  "all of them");
    if constexpr (MODULE + 1 < S::kNumModules) {
        if (module != MODULE) return rule_of_module<S, MODULE + 1>(layer, module);
    }
    return &layer.modules[MODULE];
}
// Returns that rule of the module whose last product is `product`.
template <class S, uint32_t MODULE = 0, class Layer>
KCCL_DECODE const auto* rule_of_product(const Layer& layer, Product<S> product) {
    if constexpr (MODULE + 1 < S::kNumModules) {
        constexpr Product<S> kLast = S::kLayer[end_of_module<S>(MODULE)].product;
        if (product != kLast) return rule_of_product<S, MODULE + 1>(layer, product);
    }
    return &layer.modules[MODULE];
}

// How a walk over a layer's ops goes on after an op: to the next op, no further because no other op
// is needed, or no further because a wait failed.
enum class Walk : uint32_t { kGoesOn, kIsOver, kFailed };

// Calls role.run<OP>(layer) for each op of a layer, in the order of the program, as long as it
// returns kGoesOn. Returns the last result.
template <class S, uint32_t OP = 0, class Role>
KCCL_DECODE Walk walk_layer(Role& role, uint32_t layer) {
    if constexpr (OP < S::kNumOps) {
        const Walk walk = role.template run<OP>(layer);
        return walk == Walk::kGoesOn ? walk_layer<S, OP + 1>(role, layer) : walk;
    } else {
        return Walk::kGoesOn;
    }
}

}  // namespace kccl::decode
