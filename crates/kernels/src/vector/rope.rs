//! Rotary position embedding.

use crate::Exec;
use crate::disjoint::Disjoint;
use crate::simd::Kernel;

/// Elements below which a call runs on the calling thread.
const PARALLEL_MIN: usize = 1 << 14;

/// Rotates pairs of dimensions of `x` `[rows][heads][head_dim]` in place.
///
/// With h = rotated / 2, pair i < h is (i, i + h), or (2i, 2i + 1) where `traditional`; it becomes
/// (a cos - b sin, b cos + a sin) with the row's `cos[i]` and `sin[i]`. `cos` and `sin` are `[rows][h]`.
/// Dimensions from `rotated` on pass through.
///
/// # Panics
/// If `rotated` is odd or greater than `head_dim`, or a length does not fit the shape.
#[allow(clippy::too_many_arguments, reason = "a shape and three slices; a struct would only rename them")]
pub fn rope(
    exec: &Exec,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    rotated: usize,
    traditional: bool,
    cos: &[f32],
    sin: &[f32],
) {
    assert!(rotated.is_multiple_of(2) && rotated <= head_dim, "{rotated} of {head_dim} dimensions");
    let (width, half) = (heads * head_dim, rotated / 2);
    if x.is_empty() || half == 0 {
        return;
    }
    assert!(x.len().is_multiple_of(width), "{} elements in rows of {width}", x.len());
    let rows = x.len() / width;
    assert_eq!(cos.len(), rows * half, "length of cos");
    assert_eq!(sin.len(), rows * half, "length of sin");
    let body = |x, cos, sin| Rope { x, head_dim, width, rotated, traditional, cos, sin };
    if x.len() < PARALLEL_MIN {
        return exec.isa.run(body(x, cos, sin));
    }
    let shared = Disjoint::new(x);
    exec.pool.for_ranges(rows, 1, &|range| {
        // SAFETY: the ranges of one region are disjoint.
        let x = unsafe { shared.part(range.start * width..range.end * width) };
        let angles = range.start * half..range.end * half;
        exec.isa.run(body(x, &cos[angles.clone()], &sin[angles]));
    });
}

struct Rope<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    width: usize,
    rotated: usize,
    traditional: bool,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let half = self.rotated / 2;
        let angles = self.cos.chunks_exact(half).zip(self.sin.chunks_exact(half));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.width).zip(angles) {
            for head in row.chunks_exact_mut(self.head_dim) {
                let pairs = &mut head[..self.rotated];
                if self.traditional {
                    rotate_neighbours(pairs, cos, sin);
                } else {
                    rotate_halves(pairs, cos, sin);
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_halves(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = rotated(*a, *b, cos, sin);
    }
}

#[inline(always)]
fn rotate_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, &cos), &sin) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let (a, b) = rotated(pair[0], pair[1], cos, sin);
        *pair = [a, b];
    }
}

#[inline(always)]
fn rotated(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), b.mul_add(cos, a * sin))
}
