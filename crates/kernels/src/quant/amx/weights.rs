//! Packed weights of a plain format, expanded step by step into tiles.

use super::super::avx512::{decode, fetch_ahead, scales};
use super::super::code;
use super::super::format::{CHUNK, LANES, Layout};
use super::super::{Blocks, QuantMatrix};
use super::Pass;
use std::arch::x86_64::*;
use std::ops::Range;

/// Bytes of one step of a block in the panel: the tile of v, 16 s and 16 c in f32.
pub(super) const fn panel_step(step: usize) -> usize {
    step * LANES + 128
}

/// How many steps the expansion is ahead of the loads of tiles, which would wait for stores that are still under way.
pub(super) const LEAD: usize = 4;

/// Slots of a panel that is used while it is filled: they hold the steps in flight and the lead.
pub(super) const RING: usize = 8;

/// The places of the steps of a panel, of all blocks, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) first: *mut u8,
    /// Where the next one is the first again, if the panel is a ring.
    end: *mut u8,
    bytes: usize,
}

impl Slots {
    #[inline(always)]
    pub(super) fn of(pass: &Pass<'_>) -> Self {
        let slots = Self::all(pass.panel, pass.layout.step);
        Self {
            end: if pass.ring { slots.first.wrapping_add(RING * slots.bytes) } else { slots.end },
            ..slots
        }
    }

    /// Of a panel that is no ring.
    #[inline(always)]
    fn all(panel: *mut u8, step: usize) -> Self {
        Self { first: panel, end: std::ptr::null_mut(), bytes: panel_step(step) }
    }

    #[inline(always)]
    pub(super) fn after(self, slot: *mut u8) -> *mut u8 {
        let next = slot.wrapping_add(self.bytes);
        if next == self.end { self.first } else { next }
    }
}

/// Where the slots of a pass's panel are filled from, in order, by the kernel that uses them.
pub(super) trait Weights<'a> {
    fn of(pass: &Pass<'a>) -> Self;

    /// Fills the next slot.
    ///
    /// # Safety
    /// As [`super::matmul`]; nobody needs what the slot held.
    unsafe fn next(&mut self);
}

/// All slots are filled already.
pub(super) struct Expanded;

impl<'a> Weights<'a> for Expanded {
    #[inline(always)]
    fn of(_: &Pass<'a>) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn next(&mut self) {}
}

/// Expands the steps of some blocks one by one.
pub(super) struct Expander<'a, const CODE: u8, const STEP: usize> {
    weight: &'a QuantMatrix,
    blocks: Blocks,
    steps: Range<usize>,
    /// The steps of the block and of the unit that are still to come.
    left: usize,
    left_in_unit: usize,
    /// The next step's unit, its codes and its scales' offset in the unit.
    unit: *const u8,
    codes: *const u8,
    scale: usize,
    slots: Slots,
    slot: *mut u8,
}

impl<'a, const CODE: u8, const STEP: usize> Expander<'a, CODE, STEP> {
    /// Expands into slots, [block][step]; the steps begin with a unit.
    #[inline(always)]
    fn new(weight: &'a QuantMatrix, blocks: Blocks, steps: Range<usize>, slots: Slots) -> Self {
        let (left, left_in_unit) = (steps.len(), 0);
        let (unit, codes) = (std::ptr::null(), std::ptr::null());
        let slot = slots.first;
        let mut new = Self { weight, blocks, steps, left, left_in_unit, unit, codes, scale: 0, slots, slot };
        new.begin_block();
        new
    }

    #[inline(always)]
    fn begin_block(&mut self) {
        if self.blocks.is_empty() {
            self.left = 0;
            return;
        }
        let layout = self.weight.layout();
        let units = self.steps.start / (layout.unit / STEP);
        self.begin_unit(self.weight.strip(self.blocks.start).wrapping_add(units * layout.block));
        self.left = self.steps.len();
    }

    #[inline(always)]
    fn begin_unit(&mut self, unit: *const u8) {
        (self.unit, self.codes, self.scale) = (unit, unit, 0);
        self.left_in_unit = self.weight.layout().unit / STEP;
    }

    /// # Safety
    /// As [`super::matmul`]; CODE and STEP are those of the layout, the panel has room.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
    #[inline]
    unsafe fn expand(&mut self) {
        if self.left == 0 {
            return;
        }
        let layout = self.weight.layout();
        let zero = _mm512_set1_epi8(layout.zero as i8);
        let to = self.slot;
        // SAFETY: the step lies in this unit of the block; everything is where the layout says; the panel has a slot
        // for it.
        unsafe {
            let s_at = self.unit.add(layout.scales_at + self.scale);
            let b_at = self.unit.add(layout.biases_at + self.scale);
            fetch_ahead(self.codes, const { 2 * STEP * code::bits(CODE) });
            fetch_ahead(s_at, 1);
            if layout.affine {
                fetch_ahead(b_at, 1);
            }
            if CODE == 4 && layout.zero == 8 {
                nibbles(self.codes, STEP / 8, to);
                self.codes = self.codes.add(STEP * 8);
            } else if STEP < CHUNK {
                let codes = decode::<CODE>(self.codes);
                let second = self.left_in_unit % 2 == 1;
                store_codes(if second { &codes[4..] } else { &codes[..4] }, zero, to);
                self.codes = self.codes.add(if second { const { 64 * code::bits(CODE) } } else { 0 });
            } else {
                for chunk in 0..STEP / CHUNK {
                    store_codes(&decode::<CODE>(self.codes), zero, to.add(chunk * CHUNK * LANES));
                    self.codes = self.codes.add(const { 64 * code::bits(CODE) });
                }
            }
            let floats = to.add(STEP * LANES).cast::<f32>();
            let s = scales::<CODE>(layout, s_at);
            _mm512_store_ps(floats, s);
            if layout.affine {
                let b = scales::<CODE>(layout, b_at);
                let middle = _mm512_set1_ps(layout.zero as f32);
                _mm512_store_ps(floats.add(LANES), _mm512_fmadd_ps(middle, s, b));
            }
        }
        self.advance(layout);
    }

    #[inline(always)]
    fn advance(&mut self, layout: &Layout) {
        self.slot = self.slots.after(self.slot);
        self.left -= 1;
        self.left_in_unit -= 1;
        // Both steps of a group of 128 have the same scale.
        self.scale += if layout.group > STEP { 0 } else { LANES * layout.scale.bytes() };
        if self.left == 0 {
            self.blocks.start += 1;
            self.begin_block();
        } else if self.left_in_unit == 0 {
            self.begin_unit(self.unit.wrapping_add(layout.block));
        }
    }
}

impl<'a, const CODE: u8, const STEP: usize> Weights<'a> for Expander<'a, CODE, STEP> {
    #[inline(always)]
    fn of(pass: &Pass<'a>) -> Self {
        Self::new(pass.weight, pass.blocks.clone(), pass.steps.clone(), Slots::of(pass))
    }

    #[inline(always)]
    unsafe fn next(&mut self) {
        // SAFETY: by the caller's word.
        unsafe { self.expand() }
    }
}

/// Fills the whole panel, [block][step].
///
/// # Safety
/// As [`super::matmul`]; `panel` has room, the steps begin with a unit.
pub(super) unsafe fn expand(weight: &QuantMatrix, blocks: Blocks, steps: Range<usize>, panel: *mut u8) {
    let layout = weight.layout();
    let expand = match (code::of(layout), layout.step) {
        (2, 32) => expand_all::<2, 32>,
        (2, _) => expand_all::<2, 64>,
        (3, 32) => expand_all::<3, 32>,
        (3, _) => expand_all::<3, 64>,
        (4, 32) => expand_all::<4, 32>,
        (4, _) => expand_all::<4, 64>,
        (5, 32) => expand_all::<5, 32>,
        (5, _) => expand_all::<5, 64>,
        (6, 32) => expand_all::<6, 32>,
        (6, _) => expand_all::<6, 64>,
        (8, 32) => expand_all::<8, 32>,
        (8, _) => expand_all::<8, 64>,
        (code::E2M1_16, _) => expand_all::<{ code::E2M1_16 }, 16>,
        _ => expand_all::<{ code::E2M1_32 }, 32>,
    };
    // SAFETY: by the caller's word.
    unsafe { expand(weight, blocks, steps, panel) }
}

/// # Safety
/// As [`expand`]; CODE and STEP are those of the layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
unsafe fn expand_all<const CODE: u8, const STEP: usize>(
    weight: &QuantMatrix,
    blocks: Blocks,
    steps: Range<usize>,
    panel: *mut u8,
) {
    let count = blocks.len() * steps.len();
    let mut expander = Expander::<CODE, STEP>::new(weight, blocks, steps, Slots::all(panel, STEP));
    for _ in 0..count {
        // SAFETY: by the caller's word.
        unsafe { expander.expand() }
    }
}

/// Writes v = code - 8 as rows of a tile, two of them for each of `count` vectors of 4-bit codes.
///
/// # Safety
/// `packed` has the vectors, `to` 128 bytes for each.
#[target_feature(enable = "avx512f,gfni")]
#[inline]
unsafe fn nibbles(packed: *const u8, count: usize, to: *mut u8) {
    // Less 8, the upper bit of a code is the other way round and is the sign. A byte of a matrix tells which bits
    // add up to a bit of the result, beginning with the last one; 0xf8 is added to all.
    let low = _mm512_set1_epi64(0x0102_0408_0808_0808);
    let high = _mm512_set1_epi64(0x1020_4080_8080_8080_u64.cast_signed());
    for row in 0..count {
        // SAFETY: by the caller's word.
        unsafe {
            let codes = _mm512_loadu_si512(packed.add(row * 64).cast());
            let to = to.add(row * 128);
            _mm512_store_si512(to.cast(), _mm512_gf2p8affine_epi64_epi8::<0xf8>(codes, low));
            _mm512_store_si512(to.add(64).cast(), _mm512_gf2p8affine_epi64_epi8::<0xf8>(codes, high));
        }
    }
}

/// Writes v = code - zero as rows of a tile.
///
/// # Safety
/// `to` has 64 bytes for each vector.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn store_codes(codes: &[__m512i], zero: __m512i, to: *mut u8) {
    for (row, code) in codes.iter().enumerate() {
        // SAFETY: by the caller's word.
        unsafe { _mm512_store_si512(to.add(row * 64).cast(), _mm512_sub_epi8(*code, zero)) };
    }
}
