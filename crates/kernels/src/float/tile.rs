//! The register tile: a few rows times a few outputs, all sums in registers.

use super::SCALE_GROUP;
use super::widen::E8M0;
use crate::simd::{Element, Simd, load_tail};
use std::ops::Range;

/// The most rows of a tile.
pub(super) const ROWS: usize = 6;
/// The most outputs of a tile.
pub(super) const OUTPUTS: usize = 4;

/// Stored elements of a matrix from some element on, and how 16 of them are widened to f32.
pub(super) trait Weights: Copy {
    /// # Safety
    /// The element is within the matrix, or its end; a multiple of a scale group if there are scales.
    unsafe fn at(self, element: usize) -> Self;
    /// # Safety
    /// 16 elements are readable from `k` on, a multiple of 16.
    unsafe fn load<S: Simd>(self, simd: S, k: usize) -> S::V;
    /// `count` < 16 elements, then zeros.
    /// # Safety
    /// `count` elements are readable from `k` on.
    unsafe fn load_tail<S: Simd>(self, simd: S, k: usize, count: usize) -> S::V;
    /// The address of element `k`, for prefetching only.
    fn address(self, k: usize) -> *const u8;
}

/// Elements that need no scale, at any alignment.
#[derive(Clone, Copy)]
pub(super) struct Plain<T>(pub(super) *const T);

/// E4M3 codes with a scale byte for each group.
#[derive(Clone, Copy)]
pub(super) struct E4m3 {
    pub(super) codes: *const u8,
    pub(super) scales: *const u8,
}

impl<T: Element> Weights for Plain<T> {
    #[inline(always)]
    unsafe fn at(self, element: usize) -> Self {
        // SAFETY: by this function's contract.
        Self(unsafe { self.0.add(element) })
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, k: usize) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { T::load(simd, self.0.add(k)) }
    }

    #[inline(always)]
    unsafe fn load_tail<S: Simd>(self, simd: S, k: usize, count: usize) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { load_tail(simd, self.0.add(k), count) }
    }

    #[inline(always)]
    fn address(self, k: usize) -> *const u8 {
        self.0.wrapping_add(k).cast()
    }
}

impl Weights for E4m3 {
    #[inline(always)]
    unsafe fn at(self, element: usize) -> Self {
        // SAFETY: by this function's contract.
        unsafe { Self { codes: self.codes.add(element), scales: self.scales.add(element / SCALE_GROUP) } }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, k: usize) -> S::V {
        // SAFETY: by this function's contract; a scale byte stands for each group of codes.
        unsafe {
            let scale = E8M0[usize::from(*self.scales.add(k / SCALE_GROUP))];
            simd.mul(simd.load_e4m3(self.codes.add(k)), simd.splat(scale))
        }
    }

    #[inline(always)]
    unsafe fn load_tail<S: Simd>(self, simd: S, _k: usize, _count: usize) -> S::V {
        // Rows are whole groups, so there is no tail.
        simd.splat(0.0)
    }

    #[inline(always)]
    fn address(self, k: usize) -> *const u8 {
        self.codes.wrapping_add(k)
    }
}

/// The most rows of a tile that the registers of `S` hold.
#[inline(always)]
pub(super) fn max_rows<S: Simd>() -> usize {
    if S::WIDE { ROWS } else { 3 }
}

/// The outputs of a tile of `rows` rows.
#[inline(always)]
pub(super) fn outputs<S: Simd>(rows: usize) -> usize {
    if S::WIDE || rows == 1 { OUTPUTS } else { 2 }
}

/// What a tile multiplies: rows of `x`, `cols` apart, with rows of weights, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Operands<W> {
    pub(super) x: *const f32,
    pub(super) w: W,
    pub(super) cols: usize,
    pub(super) stride: usize,
    /// How many elements ahead weights are asked for; 0: not at all.
    pub(super) ahead: usize,
}

/// Floats in which a tile keeps its lanes between two ranges of columns.
pub(super) const LANES: usize = ROWS * OUTPUTS * 16;

/// Sums `columns` of `rows` rows and `outputs` outputs, and gives the sums once the last column is done.
///
/// The ranges of columns of one tile come in ascending order and are multiples of 16, but for the last end.
///
/// # Safety
/// Readable are `cols` elements of each row of both operands. `rows` and `outputs` are at least 1 and at most
/// `max_rows` and `outputs` of them. `lanes` points to `LANES` floats of this tile if the columns come in more
/// than one range.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, W: Weights>(
    simd: S,
    operands: Operands<W>,
    rows: usize,
    outputs: usize,
    columns: Range<usize>,
    lanes: *mut f32,
) -> [[f32; OUTPUTS]; ROWS] {
    // SAFETY: this function's contract is that of the sized ones.
    unsafe {
        match (S::WIDE, rows) {
            (_, 1) => sized::<S, W, 1, 4>(simd, operands, outputs, columns, lanes),
            (true, 2) => sized::<S, W, 2, 4>(simd, operands, outputs, columns, lanes),
            (true, 3) => sized::<S, W, 3, 4>(simd, operands, outputs, columns, lanes),
            (true, 4) => sized::<S, W, 4, 4>(simd, operands, outputs, columns, lanes),
            (true, 5) => sized::<S, W, 5, 4>(simd, operands, outputs, columns, lanes),
            (true, _) => sized::<S, W, 6, 4>(simd, operands, outputs, columns, lanes),
            (false, 2) => sized::<S, W, 2, 2>(simd, operands, outputs, columns, lanes),
            (false, _) => sized::<S, W, 3, 2>(simd, operands, outputs, columns, lanes),
        }
    }
}

/// # Safety
/// As for `tile`, with M rows and at most N outputs.
#[inline(always)]
unsafe fn sized<S: Simd, W: Weights, const M: usize, const N: usize>(
    simd: S,
    operands: Operands<W>,
    outputs: usize,
    columns: Range<usize>,
    lanes: *mut f32,
) -> [[f32; OUTPUTS]; ROWS] {
    let Operands { x, cols, stride, ahead, .. } = operands;
    // Where there are fewer than N outputs, the last one is computed several times.
    let mut w = [operands.w; N];
    for (n, w) in w.iter_mut().enumerate() {
        // SAFETY: an output that exists.
        *w = unsafe { w.at(n.min(outputs - 1) * stride) };
    }
    let mut sums = [[simd.splat(0.0); N]; M];
    if columns.start > 0 {
        for (i, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
            // SAFETY: M * N vectors fit in `LANES`.
            *sum = unsafe { simd.load(lanes.add(i * 16)) };
        }
    }
    let whole = columns.end / 16 * 16;
    let mut k = columns.start;
    while k < whole {
        let mut wk = [simd.splat(0.0); N];
        for (wk, w) in wk.iter_mut().zip(&w) {
            if ahead > 0 {
                simd.prefetch(w.address(k + ahead));
            }
            // SAFETY: 16 elements are readable from `k` on.
            *wk = unsafe { w.load(simd, k) };
        }
        // SAFETY: as above.
        unsafe { step(simd, &mut sums, x.add(k), cols, wk) };
        k += 16;
    }
    let mut out = [[0.0; OUTPUTS]; ROWS];
    if columns.end < cols {
        for (i, &sum) in sums.as_flattened().iter().enumerate() {
            // SAFETY: as for the load above.
            unsafe { simd.store(lanes.add(i * 16), sum) };
        }
        return out;
    }
    if whole < cols {
        let count = cols - whole;
        let mut wk = [simd.splat(0.0); N];
        for (wk, w) in wk.iter_mut().zip(&w) {
            // SAFETY: `count` elements are readable from `whole` on.
            *wk = unsafe { w.load_tail(simd, whole, count) };
        }
        let mut x_tail = [[0.0; 16]; M];
        for (m, x_tail) in x_tail.iter_mut().enumerate() {
            // SAFETY: as above, of row m; `x_tail` is 16 floats.
            unsafe { simd.store(x_tail.as_mut_ptr(), load_tail(simd, x.add(m * cols + whole), count)) };
        }
        // SAFETY: `x_tail` holds M rows of 16.
        unsafe { step(simd, &mut sums, x_tail.as_ptr().cast(), 16, wk) };
    }
    for (out, sums) in out.iter_mut().zip(&sums) {
        let mut four = [simd.splat(0.0); OUTPUTS];
        four[..N].copy_from_slice(sums);
        *out = simd.sums(four);
    }
    out
}

/// Adds the products of 16 elements of each row of `x`, `stride` apart, with those of each output.
///
/// # Safety
/// 16 elements of each of the M rows are readable.
#[inline(always)]
unsafe fn step<S: Simd, const M: usize, const N: usize>(
    simd: S,
    sums: &mut [[S::V; N]; M],
    x: *const f32,
    stride: usize,
    w: [S::V; N],
) {
    for (m, sums) in sums.iter_mut().enumerate() {
        // SAFETY: by this function's contract.
        let x = unsafe { simd.load(x.add(m * stride)) };
        for (sum, &w) in sums.iter_mut().zip(&w) {
            *sum = simd.fma(x, w, *sum);
        }
    }
}
