// The functions of engine/kernels/math.cuh, as the simulator and AMD's GPUs have them, against long
// double; and what they make of infinities and NaN. Exits with 1 if one is wrong, and names it.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>

#include "engine/kernels/math.cuh"

namespace {

using namespace kccl::decode;
using Long = long double;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool is_wrong = false;

void expect(bool is_right, const char* what) {
    if (is_right) return;
    std::printf("not so: %s\n", what);
    is_wrong = true;
}

// Compares at `low`, `high` and many numbers between them. `limit` in units of the last place.
template <typename Float, typename Got, typename Wanted>
void compare(const char* name, double limit, Float low, Float high, Got got, Wanted wanted) {
    std::mt19937 rng(1);
    std::uniform_real_distribution<Float> between(low, high);
    for (int i = 0; i < 200'000; ++i) {
        const Float x = i == 0 ? low : i == 1 ? high : between(rng);
        const Long right = wanted(Long{x});
        const Float nearest = std::fabs(static_cast<Float>(right));
        const Float unit =
            std::nextafter(nearest, std::numeric_limits<Float>::infinity()) - nearest;
        const auto error = static_cast<double>(std::fabs(got(x) - right) / unit);
        if (error <= limit) continue;
        std::printf("%s(%.9g): %.2f units of the last place\n", name, double{x}, error);
        is_wrong = true;
        return;
    }
}

}  // namespace

int main() {
    const auto exp2 = [](Long x) { return std::exp2(x); };
    const auto exp = [](Long x) { return std::exp(x); };
    const auto log = [](Long x) { return std::log(x); };
    const auto of_double = [](double x) { return exponential(x); };
    compare("reciprocal", 2, 1e-3f, 1e3f, reciprocal, [](Long x) { return 1 / x; });
    compare("reciprocal_root", 2, 1e-3f, 1e3f, reciprocal_root,
            [](Long x) { return 1 / std::sqrt(x); });
    compare("exponential2", 2, -126.0f, 127.0f, exponential2, exp2);
    compare("exponential2", 2, -1.0f, 1.0f, exponential2, exp2);
    compare("exponential", 2, -708.0, 708.0, of_double, exp);
    compare("exponential", 2, -1.0, 1.0, of_double, exp);
    compare("logarithm", 3, 1e-3, 1e300, logarithm, log);
    compare("logarithm", 3, 1e-9, 2.0, logarithm, log);
    compare("logarithm", 3, 0.999, 1.001, logarithm, log);

    bool is_exact = true;
    for (int n = -126; n <= 127; ++n) {
        is_exact = is_exact && power_of_two(static_cast<float>(n)) == std::ldexp(1.0f, n);
    }
    expect(is_exact, "power_of_two is exact");
    expect(power_of_two(-127.0f) == 0 && power_of_two(-kInfinity) == 0, "power_of_two ends at 0");
    expect(power_of_two(kNan) == 0, "power_of_two of NaN is 0");
    expect(std::isnan(exponential2(kNan)), "exponential2 of NaN is NaN");
    expect(exponential2(-kInfinity) == 0, "exponential2 of -infinity is 0");
    expect(exponential(-800.0) == 0, "exponential of -800 is 0");
    expect(std::isnan(silu(kNan)), "silu of NaN is NaN");
    expect(silu(-1e4f) <= 0 && silu(-1e4f) > -1e-30f && silu(1e4f) == 1e4f, "silu's ends");
    expect(is_finite(3e38f) && !is_finite(-kInfinity) && !is_finite(kNan), "is_finite");
    expect(rounded(2.5f) == 2 && rounded(-1.6f) == -2, "rounded");
    return is_wrong ? 1 : 0;
}
