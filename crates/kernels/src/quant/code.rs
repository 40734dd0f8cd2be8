//! What a SIMD kernel is compiled for: a bit width, or one of the two E2M1 formats, and what goes with it.

use super::format::Layout;

/// E2M1 in groups of 32 (mxfp4).
pub(super) const E2M1_32: u8 = 32;
/// E2M1 in groups of 16 (nvfp4).
pub(super) const E2M1_16: u8 = 16;

/// The code of a format.
pub(super) fn of(layout: &Layout) -> u8 {
    match (layout.e2m1, layout.step) {
        (true, 16) => E2M1_16,
        (true, _) => E2M1_32,
        _ => layout.bits as u8,
    }
}

/// Bits of a stored code.
pub(super) const fn bits(code: u8) -> usize {
    if code >= E2M1_16 { 4 } else { code as usize }
}

/// Groups of super-blocks in a chunk of 32 inputs.
pub(super) const fn groups_a_chunk(code: u8) -> usize {
    if matches!(code, 2 | 3 | 6) { 2 } else { 1 }
}

/// Whether the super-blocks of a bit width have mins.
pub(super) const fn mins(code: u8) -> bool {
    matches!(code, 2 | 4 | 5)
}
