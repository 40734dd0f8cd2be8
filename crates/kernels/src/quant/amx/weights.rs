//! Packed weights of a plain format, expanded step by step into tiles.

use super::super::avx512::{AHEAD, decode, fetch, scales};
use super::super::code;
use super::super::format::{CHUNK, LANES, Layout};
use super::super::scalar::E2M1;
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
    /// # Safety
    /// As [`super::matmul`].
    unsafe fn of(pass: &Pass<'a>) -> Self;

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
    unsafe fn of(_: &Pass<'a>) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn next(&mut self) {}
}

/// Expands the steps of some blocks one by one.
pub(super) struct Expander<'a, const CODE: u8, const STEP: usize, const AFFINE: bool> {
    layout: &'a Layout,
    /// The next step's unit, and its number in it.
    unit: *const u8,
    step: usize,
    /// Units still to come of the block.
    left: usize,
    /// Units of the panel and block, and bytes from their end to the next block's.
    units: usize,
    skip: usize,
    /// The very last unit, which is expanded again when all are.
    last: *const u8,
    values: Values,
    slots: Slots,
    slot: *mut u8,
}

impl<'a, const CODE: u8, const STEP: usize, const AFFINE: bool> Expander<'a, CODE, STEP, AFFINE> {
    /// Expands into slots, [block][step]; the steps are whole units.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn new(weight: &'a QuantMatrix, blocks: Blocks, steps: Range<usize>, slots: Slots) -> Self {
        let layout = weight.layout();
        let per_unit = layout.unit / STEP;
        let (first, units) = (steps.start / per_unit, steps.len() / per_unit);
        let unit = weight.strip(blocks.start).wrapping_add(first * layout.block);
        let skip = (weight.units() - units) * layout.block;
        let all = (blocks.len() - 1) * weight.units() + units - 1;
        let last = unit.wrapping_add(all * layout.block);
        let (left, values, slot) = (units, Values::of::<CODE>(layout.zero), slots.first);
        Self { layout, unit, step: 0, left, units, skip, last, values, slots, slot }
    }

    /// Expands the next step.
    ///
    /// # Safety
    /// As [`super::matmul`]; CODE, STEP and AFFINE are those of the layout, the panel has room.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")]
    #[inline]
    unsafe fn expand(&mut self) {
        let layout = self.layout;
        // Both steps of a group of 128 have the same scale.
        let scale = if layout.group > STEP { 0 } else { self.step * LANES * layout.scale.bytes() };
        // SAFETY: the step lies in this unit; everything is where the layout says; the panel has a slot for it.
        unsafe {
            let codes = self.unit.add(self.step * const { STEP * 2 * code::bits(CODE) });
            let s_at = self.unit.add(layout.scales_at + scale);
            let b_at = self.unit.add(layout.biases_at + scale);
            fetch(codes, const { 2 * STEP * code::bits(CODE) }, AHEAD);
            fetch(s_at, 1, AHEAD);
            if AFFINE {
                fetch(b_at, 1, AHEAD);
            }
            self.values.expand::<CODE, STEP>(codes, self.slot);
            let floats = self.slot.add(STEP * LANES).cast::<f32>();
            let s = scales::<CODE>(layout, s_at);
            _mm512_store_ps(floats, s);
            if AFFINE {
                let b = scales::<CODE>(layout, b_at);
                let middle = _mm512_set1_ps(layout.zero as f32);
                _mm512_store_ps(floats.add(LANES), _mm512_fmadd_ps(middle, s, b));
            }
        }
        self.slot = self.slots.after(self.slot);
        self.step += 1;
        if self.step == layout.unit / STEP {
            self.step = 0;
            self.next_unit();
        }
    }

    #[inline(always)]
    fn next_unit(&mut self) {
        let mut next = self.unit.wrapping_add(self.layout.block);
        self.left -= 1;
        if self.left == 0 {
            self.left = self.units;
            next = next.wrapping_add(self.skip);
        }
        self.unit = next.min(self.last);
    }
}

/// What codes become.
#[derive(Clone, Copy)]
struct Values {
    /// Of 4-bit codes the values of all 16, four times; of others the zero.
    of: __m512i,
}

impl Values {
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn of<const CODE: u8>(zero: i32) -> Self {
        let zero = _mm512_set1_epi8(zero as i8);
        if code::bits(CODE) != 4 {
            return Self { of: zero };
        }
        let decoded = if CODE >= code::E2M1_16 { E2M1 } else { IOTA };
        // SAFETY: there are 16 bytes.
        let decoded = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(decoded.as_ptr().cast()) });
        Self { of: _mm512_sub_epi8(decoded, zero) }
    }

    /// Writes the values of a step as a tile.
    ///
    /// # Safety
    /// `packed` has the codes of STEP inputs, `to` room for as many values of 16 outputs.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")]
    #[inline]
    unsafe fn expand<const CODE: u8, const STEP: usize>(self, packed: *const u8, to: *mut u8) {
        // SAFETY: by the caller's word.
        unsafe {
            if code::bits(CODE) == 4 {
                self.nibbles(packed, STEP / 8, to);
            } else {
                for chunk in 0..STEP / CHUNK {
                    let codes = decode::<CODE>(packed.add(chunk * const { 64 * code::bits(CODE) }));
                    for (row, code) in codes.iter().enumerate() {
                        let to = to.add((chunk * (CHUNK / 4) + row) * 64);
                        _mm512_store_si512(to.cast(), _mm512_sub_epi8(*code, self.of));
                    }
                }
            }
        }
    }

    /// Of 4-bit codes, two rows of the tile for each of `count` vectors.
    ///
    /// # Safety
    /// `packed` has the vectors, `to` 128 bytes for each.
    #[target_feature(enable = "avx512f,avx512vbmi")]
    #[inline]
    unsafe fn nibbles(self, packed: *const u8, count: usize, to: *mut u8) {
        // An index has six bits; the two of the other code make no difference, since the values stand there four times.
        // Each byte of eight gets the bits from one of these on; the last ones wrap around, where they make none either.
        let upper = _mm512_set1_epi64(0x3c34_2c24_1c14_0c04);
        for row in 0..count {
            // SAFETY: by the caller's word.
            unsafe {
                let codes = _mm512_loadu_si512(packed.add(row * 64).cast());
                let to = to.add(row * 128);
                _mm512_store_si512(to.cast(), _mm512_permutexvar_epi8(codes, self.of));
                let codes = _mm512_multishift_epi64_epi8(upper, codes);
                _mm512_store_si512(to.add(64).cast(), _mm512_permutexvar_epi8(codes, self.of));
            }
        }
    }
}

impl<'a, const CODE: u8, const STEP: usize, const AFFINE: bool> Weights<'a>
    for Expander<'a, CODE, STEP, AFFINE>
{
    #[inline(always)]
    unsafe fn of(pass: &Pass<'a>) -> Self {
        // SAFETY: by the caller's word.
        unsafe { Self::new(pass.weight, pass.blocks.clone(), pass.steps.clone(), Slots::of(pass)) }
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
    type Expand = unsafe fn(&QuantMatrix, Blocks, Range<usize>, *mut u8);
    fn all<const CODE: u8, const STEP: usize>(affine: bool) -> Expand {
        if affine { expand_all::<CODE, STEP, true> } else { expand_all::<CODE, STEP, false> }
    }
    let affine = layout.affine;
    let expand = match (code::of(layout), layout.step) {
        (2, 32) => all::<2, 32>(affine),
        (2, _) => all::<2, 64>(affine),
        (3, 32) => all::<3, 32>(affine),
        (3, _) => all::<3, 64>(affine),
        (4, 32) => all::<4, 32>(affine),
        (4, _) => all::<4, 64>(affine),
        (5, 32) => all::<5, 32>(affine),
        (5, _) => all::<5, 64>(affine),
        (6, 32) => all::<6, 32>(affine),
        (6, _) => all::<6, 64>(affine),
        (8, 32) => all::<8, 32>(affine),
        (8, _) => all::<8, 64>(affine),
        (code::E2M1_16, _) => all::<{ code::E2M1_16 }, 16>(affine),
        _ => all::<{ code::E2M1_32 }, 32>(affine),
    };
    // SAFETY: by the caller's word.
    unsafe { expand(weight, blocks, steps, panel) }
}

/// # Safety
/// As [`expand`]; CODE, STEP and AFFINE are those of the layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")]
unsafe fn expand_all<const CODE: u8, const STEP: usize, const AFFINE: bool>(
    weight: &QuantMatrix,
    blocks: Blocks,
    steps: Range<usize>,
    panel: *mut u8,
) {
    let count = blocks.len() * steps.len();
    let mut expander = Expander::<CODE, STEP, AFFINE>::new(weight, blocks, steps, Slots::all(panel, STEP));
    for _ in 0..count {
        // SAFETY: by the caller's word.
        unsafe { expander.expand() }
    }
}

/// The values of unsigned codes.
const IOTA: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
