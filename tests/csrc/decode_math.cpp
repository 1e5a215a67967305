// Tests functions of engine/kernels/math.cuh, in the form that AMD's GPUs and the simulator use.
// Those that promise an accuracy are compared with long double. Others are tested at infinities and
// NaN. The program prints what is wrong, and then exits with 1.
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

// A Float: low, high, and then any between them.
template <typename Float>
class Between {
  public:
    Between(Float low, Float high) : low_(low), high_(high), numbers_(low, high) {}

    Float next() {
        ++count_;
        return count_ == 1 ? low_ : count_ == 2 ? high_ : numbers_(rng_);
    }

  private:
    Float low_, high_;
    std::uniform_real_distribution<Float> numbers_;
    std::mt19937 rng_{1};
    int count_ = 0;
};

// Compares got(x) with wanted(x) for many x that `next` returns. `limit` is in units of the last
// place.
template <typename Next, typename Got, typename Wanted>
void compare(const char* name, double limit, Next next, Got got, Wanted wanted) {
    using Float = decltype(next());
    double worst = 0;
    Float where = 0;
    for (int i = 0; i < 200'000; ++i) {
        const Float x = next();
        const Long right = wanted(Long{x});
        const Float nearest = std::fabs(static_cast<Float>(right));
        const Float unit =
            std::nextafter(nearest, std::numeric_limits<Float>::infinity()) - nearest;
        const auto error = static_cast<double>(std::fabs(got(x) - right) / unit);
        if (error <= worst) continue;
        worst = error;
        where = x;
    }
    if (worst <= limit) return;
    std::printf("%s(%.9g): %.2f units of the last place\n", name, double{where}, worst);
    is_wrong = true;
}

}  // namespace

int main() {
    const auto floats = [](float low, float high) {
        return [numbers = Between(low, high)]() mutable { return numbers.next(); };
    };
    const auto doubles = [](double low, double high) {
        return [numbers = Between(low, high)]() mutable { return numbers.next(); };
    };
    const auto exp2 = [](Long x) { return std::exp2(x); };
    const auto exp = [](Long x) { return std::exp(x); };
    const auto log = [](Long x) { return std::log(x); };
    const auto of_double = [](double x) { return exponential(x); };
    compare("reciprocal", 2, floats(1e-3f, 1e3f), reciprocal, [](Long x) { return 1 / x; });
    compare("reciprocal_root", 2, floats(1e-3f, 1e3f), reciprocal_root,
            [](Long x) { return 1 / std::sqrt(x); });
    compare("exponential2", 2, floats(-126, 127), exponential2, exp2);
    compare("exponential2", 2, floats(-1, 1), exponential2, exp2);
    compare("exponential", 2, doubles(-708, 708), of_double, exp);
    compare("exponential", 2, doubles(-1, 1), of_double, exp);
    // Numbers of all sizes.
    const auto sizes = [exponents = Between(-1020.0, 1023.0)]() mutable {
        return std::exp2(exponents.next());
    };
    compare("logarithm", 3, sizes, logarithm, log);
    compare("logarithm", 3, doubles(1e-9, 2), logarithm, log);
    compare("logarithm", 3, doubles(0.999, 1.001), logarithm, log);

    bool is_exact = true;
    for (int n = -126; n <= 127; ++n) {
        is_exact = is_exact && power_of_two(static_cast<float>(n)) == std::ldexp(1.0f, n);
    }
    expect(is_exact, "power_of_two is exact");
    expect(power_of_two(-127.0f) == 0 && power_of_two(-kInfinity) == 0, "power_of_two ends at 0");
    expect(power_of_two(kNan) == 0, "power_of_two of NaN is 0");
    expect(std::isnan(reciprocal(kNan)), "reciprocal of NaN is NaN");
    expect(std::isnan(reciprocal_root(kNan)), "reciprocal_root of NaN is NaN");
    expect(std::isnan(exponential2(kNan)), "exponential2 of NaN is NaN");
    expect(exponential2(-kInfinity) == 0, "exponential2 of -infinity is 0");
    expect(exponential(-800.0) == 0, "exponential of -800 is 0");
    expect(std::isnan(silu(kNan)), "silu of NaN is NaN");
    expect(silu(-1e4f) <= 0 && silu(-1e4f) > -1e-30f && silu(1e4f) == 1e4f, "silu's ends");
    expect(is_finite(3e38f) && !is_finite(-kInfinity) && !is_finite(kNan), "is_finite");
    expect(rounded(2.5f) == 2 && rounded(-1.6f) == -2, "rounded");
    return is_wrong ? 1 : 0;
}
