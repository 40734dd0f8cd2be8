//! Short causal convolutions along the rows, each feature by itself.

use crate::Exec;
use crate::disjoint::Disjoint;
use crate::simd::Kernel;

/// Elements below which a call runs on the calling thread.
const PARALLEL_MIN: usize = 1 << 14;

/// `out[r][c] = bias[c] + sum over t of weight[t][c] * input[r + t][c]`, one tap after the other, where the rows of
/// `input` are those of `history` and then those of `x`.
///
/// The width of a row is the length of `bias`; `weight` has one row more than `history`. The last tap meets the row
/// itself.
///
/// # Panics
/// If a length is not whole rows, or the numbers of rows do not fit.
pub fn causal_conv(exec: &Exec, x: &[f32], history: &[f32], weight: &[f32], bias: &[f32], out: &mut [f32]) {
    let width = bias.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "{} elements in rows of {width}", x.len());
    assert!(
        history.len().is_multiple_of(width) && weight.len() == history.len() + width,
        "{} weights in rows of {width} after a history of {}",
        weight.len(),
        history.len()
    );
    assert_eq!(x.len(), out.len(), "length of the output");
    let run = |start: usize, out: &mut [f32]| {
        exec.isa.run(CausalConv { x, history, weight, bias, first: start / width, out });
    };
    if x.len() < PARALLEL_MIN {
        return run(0, out);
    }
    let count = out.len();
    let shared = Disjoint::new(out);
    exec.pool.for_ranges(count, width, &|range| {
        // SAFETY: the ranges of one region are disjoint.
        run(range.start, unsafe { shared.part(range) });
    });
}

struct CausalConv<'a> {
    x: &'a [f32],
    history: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    /// The row of the first output.
    first: usize,
    out: &'a mut [f32],
}

impl Kernel for CausalConv<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let width = self.bias.len();
        for (row, out) in self.out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(self.bias);
            for (tap, weight) in self.weight.chunks_exact(width).enumerate() {
                let at = (self.first + row + tap) * width;
                let input = match at.checked_sub(self.history.len()) {
                    None => &self.history[at..at + width],
                    Some(at) => &self.x[at..at + width],
                };
                for ((out, &weight), &input) in out.iter_mut().zip(weight).zip(input) {
                    *out = weight.mul_add(input, *out);
                }
            }
        }
    }
}
