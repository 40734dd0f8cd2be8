//! The tile instructions of AMX. Stable Rust has no intrinsics for them, so they are written in assembly.
//!
//! Tiles 0 to 3 hold sums [rows][16] of i32, 4 and 5 digits of the input [rows][inputs], 6 and 7 weights
//! [inputs / 4][16 outputs][4]. In memory each row of a tile takes 64 bytes. The compiler knows nothing of tiles
//! and never touches them.
//!
//! # Safety
//! All functions need AMX int8, a tile configuration ([`configure`]) on this thread, and pointers to as many rows
//! of 64 bytes as the tile has.

use std::arch::asm;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Shapes the tiles for `rows` rows of the input and sums over `inputs` inputs, both at most 16 and 64.
pub(super) unsafe fn configure(rows: usize, inputs: usize) {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        config.row_bytes[tile] = if matches!(tile, 4 | 5) { inputs as u16 } else { 64 };
        config.rows[tile] = if tile < 6 { rows as u8 } else { (inputs / 4) as u8 };
    }
    // SAFETY: by the caller's word the CPU has AMX; the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}

/// Gives the tile state back, so that the thread is cheap to switch again.
pub(super) unsafe fn release() {
    // SAFETY: see the module.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

#[inline(always)]
pub(super) unsafe fn load<const T: u8>(from: *const u8) {
    // SAFETY: see the module.
    unsafe {
        asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) from, s = in(reg) 64usize,
            options(nostack, readonly));
    }
}

#[inline(always)]
pub(super) unsafe fn store<const T: u8>(to: *mut i32) {
    // SAFETY: see the module.
    unsafe {
        asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) to, s = in(reg) 64usize,
            options(nostack));
    }
}

#[inline(always)]
pub(super) unsafe fn zero<const T: u8>() {
    // SAFETY: see the module.
    unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem)) }
}

/// Adds the products of input A and weights B to C; the input is signed, the weights as `SIGNED` says.
#[inline(always)]
pub(super) unsafe fn multiply<const C: u8, const A: u8, const B: u8, const SIGNED: bool>() {
    // SAFETY: see the module.
    unsafe {
        if SIGNED {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem));
        } else {
            asm!("tdpbsud tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem));
        }
    }
}
