//! Kernels whose every output element depends on the same element of the inputs only.

use super::math;
use crate::Exec;
use crate::disjoint::Disjoint;
use crate::simd::Kernel;

/// Elements below which a call is not worth a parallel region: some 5 µs of work for the costlier functions.
const PARALLEL_MIN: usize = 1 << 14;
/// Ranges are cut at whole cache lines.
const STEP: usize = 16;

/// out = silu(gate) * up.
///
/// # Panics
/// If the lengths differ.
pub fn swiglu(exec: &Exec, gate: &[f32], up: &[f32], out: &mut [f32]) {
    binary(exec, gate, up, out, silu_times);
}

/// out = gelu_tanh(gate) * up.
///
/// # Panics
/// If the lengths differ.
pub fn geglu_tanh(exec: &Exec, gate: &[f32], up: &[f32], out: &mut [f32]) {
    binary(exec, gate, up, out, gelu_times);
}

/// out = (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within ±`limit`: that of gpt-oss
/// (`GptOssExperts` in `modeling_gpt_oss.py` of transformers). NaN stays.
///
/// # Panics
/// If the lengths differ.
pub fn clamped_swiglu(exec: &Exec, gate: &[f32], up: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
    binary(exec, gate, up, out, move |gate, up| clamped_silu_times(gate, up, alpha, limit));
}

/// out = a + b.
///
/// # Panics
/// If the lengths differ.
pub fn add(exec: &Exec, a: &[f32], b: &[f32], out: &mut [f32]) {
    binary(exec, a, b, out, plus);
}

/// out = a * b.
///
/// # Panics
/// If the lengths differ.
pub fn multiply(exec: &Exec, a: &[f32], b: &[f32], out: &mut [f32]) {
    binary(exec, a, b, out, times);
}

/// x *= factor.
pub fn scale(exec: &Exec, x: &mut [f32], factor: f32) {
    unary(exec, x, factor, times);
}

/// x = cap * tanh(x / cap): keeps logits within ±cap.
pub fn softcap(exec: &Exec, x: &mut [f32], cap: f32) {
    unary(exec, x, cap, capped);
}

#[inline(always)]
fn silu_times(gate: f32, up: f32) -> f32 {
    math::silu(gate) * up
}

#[inline(always)]
fn clamped_silu_times(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    // Comparisons that NaN fails leave it as it is.
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    (up + 1.0) * (gate * math::sigmoid(alpha * gate))
}

#[inline(always)]
fn gelu_times(gate: f32, up: f32) -> f32 {
    math::gelu_tanh(gate) * up
}

#[inline(always)]
fn plus(a: f32, b: f32) -> f32 {
    a + b
}

#[inline(always)]
fn times(x: f32, factor: f32) -> f32 {
    x * factor
}

#[inline(always)]
pub(crate) fn capped(x: f32, cap: f32) -> f32 {
    cap * math::tanh(x / cap)
}

struct Binary<'a, F> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
    f: F,
}

impl<F: Fn(f32, f32) -> f32> Kernel for Binary<'_, F> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for ((out, &a), &b) in self.out.iter_mut().zip(self.a).zip(self.b) {
            *out = (self.f)(a, b);
        }
    }
}

struct Unary<'a, F> {
    x: &'a mut [f32],
    parameter: f32,
    f: F,
}

impl<F: Fn(f32, f32) -> f32> Kernel for Unary<'_, F> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for x in self.x {
            *x = (self.f)(*x, self.parameter);
        }
    }
}

fn binary<F>(exec: &Exec, a: &[f32], b: &[f32], out: &mut [f32], f: F)
where
    F: Fn(f32, f32) -> f32 + Copy + Sync,
{
    assert_eq!(a.len(), out.len(), "length of the first input");
    assert_eq!(b.len(), out.len(), "length of the second input");
    if out.len() < PARALLEL_MIN {
        return exec.isa.run(Binary { a, b, out, f });
    }
    let count = out.len();
    let shared = Disjoint::new(out);
    exec.pool.for_ranges(count, STEP, &|range| {
        // SAFETY: the ranges of one region are disjoint.
        let out = unsafe { shared.part(range.clone()) };
        exec.isa.run(Binary { a: &a[range.clone()], b: &b[range], out, f });
    });
}

fn unary<F>(exec: &Exec, x: &mut [f32], parameter: f32, f: F)
where
    F: Fn(f32, f32) -> f32 + Copy + Sync,
{
    if x.len() < PARALLEL_MIN {
        return exec.isa.run(Unary { x, parameter, f });
    }
    let count = x.len();
    let shared = Disjoint::new(x);
    exec.pool.for_ranges(count, STEP, &|range| {
        // SAFETY: the ranges of one region are disjoint.
        let x = unsafe { shared.part(range) };
        exec.isa.run(Unary { x, parameter, f });
    });
}
