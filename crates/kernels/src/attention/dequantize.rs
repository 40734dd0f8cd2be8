//! Quantized keys and values of a block to f32, in 16 lanes: the bits are those of [`KvQuant`]'s definition.

use super::quantized::KvQuant;
use super::state::store;
use super::{BLOCK, KvShape, KvType};
use crate::simd::{Element, Simd};
use half::{bf16, f16};

/// The keys or the values of one head in a block.
pub(super) struct Packed<'a> {
    pub(super) shape: &'a KvShape,
    pub(super) quant: KvQuant,
    /// `KvQuant::head_bytes`.
    pub(super) data: &'a [u8],
    /// As many bytes to ask for, since they are read next.
    pub(super) next: Option<*const u8>,
}

impl Packed<'_> {
    /// The keys, `[head_dim][BLOCK]`.
    #[inline(always)]
    pub(super) fn keys<S: Simd>(&self, simd: S, to: &mut [f32]) {
        self.check(to);
        let codes = simd.codes(self.quant.bits());
        // SAFETY: the lengths were checked. Behind the last codes there are at least 64 bytes of scales.
        unsafe {
            if self.quant.bits() == 8 {
                self.keys_by(simd, to, |at| simd.load_bytes(at));
            } else {
                self.keys_by(simd, to, |at| simd.load_codes(codes, at));
            }
        }
    }

    /// The values, `[BLOCK][head_dim]`.
    #[inline(always)]
    pub(super) fn values<S: Simd>(&self, simd: S, to: &mut [f32]) {
        self.check(to);
        let codes = simd.codes(self.quant.bits());
        // SAFETY: as for the keys.
        unsafe {
            if self.quant.bits() == 8 {
                self.values_by(simd, to, |at| simd.load_bytes(at));
            } else {
                self.values_by(simd, to, |at| simd.load_codes(codes, at));
            }
        }
    }

    #[inline(always)]
    fn check(&self, to: &[f32]) {
        assert!(self.quant.fits(self.shape.head_dim), "whole groups");
        assert_eq!(self.data.len(), self.quant.head_bytes(self.shape), "bytes of a head");
        assert_eq!(to.len(), self.shape.head_dim * BLOCK, "elements of a head");
    }

    /// `read` gives the 16 codes that begin at an address.
    ///
    /// # Safety
    /// The lengths are those of `check`, and `read` may read 16 bytes wherever codes begin.
    #[inline(always)]
    unsafe fn keys_by<S: Simd>(&self, simd: S, to: &mut [f32], read: impl Fn(*const u8) -> S::V) {
        let (bits, group) = (self.quant.bits(), self.quant.group());
        let (mut from, mut to) = (self.data.as_ptr(), to.as_mut_ptr());
        for index in 0..self.shape.head_dim / group {
            let (scale, bias) = (self.factors(simd, 0, index), self.factors(simd, 1, index));
            for _ in 0..group {
                self.ask(simd, from);
                // SAFETY: each of the head's dimensions has 32 codes, 4 * bits bytes, and 32 elements.
                unsafe {
                    simd.store(to, simd.fma(read(from), scale[0], bias[0]));
                    simd.store(to.add(16), simd.fma(read(from.add(2 * bits)), scale[1], bias[1]));
                    (from, to) = (from.add(4 * bits), to.add(BLOCK));
                }
            }
        }
    }

    /// As `keys_by`.
    ///
    /// # Safety
    /// As for `keys_by`.
    #[inline(always)]
    unsafe fn values_by<S: Simd>(&self, simd: S, to: &mut [f32], read: impl Fn(*const u8) -> S::V) {
        let (bits, group, head_dim) = (self.quant.bits(), self.quant.group(), self.shape.head_dim);
        for index in 0..head_dim / group {
            let mut factors = [[0.0; BLOCK]; 2];
            for (which, to) in factors.iter_mut().enumerate() {
                let from = self.factors(simd, which, index);
                store(simd, to, 0, from[0]);
                store(simd, to, 16, from[1]);
            }
            let [scales, biases] = factors;
            for (t, (scale, bias)) in scales.into_iter().zip(biases).enumerate() {
                let (scale, bias) = (simd.splat(scale), simd.splat(bias));
                let at = t * head_dim + index * group;
                // SAFETY: a group of each of the BLOCK tokens has `group` codes and elements; 8 codes take `bits`
                // bytes, and a group is whole vectors of 16.
                unsafe {
                    let (mut from, mut to) = (self.data.as_ptr().add(at / 8 * bits), to.as_mut_ptr().add(at));
                    self.ask(simd, from);
                    for _ in 0..group / 16 {
                        simd.store(to, simd.fma(read(from), scale, bias));
                        (from, to) = (from.add(2 * bits), to.add(16));
                    }
                }
            }
        }
    }

    /// The scales (`which` 0) or the biases (1) of a group for all tokens.
    #[inline(always)]
    fn factors<S: Simd>(&self, simd: S, which: usize, group: usize) -> [S::V; 2] {
        let (at, size) = (self.quant.factor_at(self.shape, which, group), self.shape.ty.bytes());
        self.ask(simd, self.data.as_ptr().wrapping_add(at));
        [0, 16].map(|t| match self.shape.ty {
            KvType::F32 => self.widened::<S, f32>(simd, at + t * size),
            KvType::F16 => self.widened::<S, f16>(simd, at + t * size),
            KvType::Bf16 => self.widened::<S, bf16>(simd, at + t * size),
        })
    }

    #[inline(always)]
    fn widened<S: Simd, E: Element>(&self, simd: S, at: usize) -> S::V {
        let elements = &self.data[at..][..16 * size_of::<E>()];
        // SAFETY: the slice holds 16 elements.
        unsafe { E::load(simd, elements.as_ptr().cast()) }
    }

    /// Asks for as much of what is read next as lies at `at` of this.
    #[inline(always)]
    fn ask<S: Simd>(&self, simd: S, at: *const u8) {
        if let Some(next) = self.next {
            simd.prefetch(next.wrapping_add(at.addr() - self.data.as_ptr().addr()));
        }
    }
}
