//! Gives the pages of a mapped file back while its tensors are packed.
//!
//! A packed matrix has all that the file holds. If the file's pages stayed mapped until the end, loading would take
//! twice the memory of the weights.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::files::Bytes;
use crate::linear::Rows;

/// Bytes given back at once: large enough that the call to the system does not count.
const STRIP: usize = 1 << 20;

/// Counts the rows of a stored matrix that are still to be read, strip by strip.
pub(crate) struct Release<'a> {
    data: &'a Bytes,
    row_bytes: usize,
    strip_rows: usize,
    left: Vec<AtomicUsize>,
}

impl<'a> Release<'a> {
    /// For reading `rows` of the matrix `data`, each of them once, in any order.
    pub(crate) fn new(data: &'a Bytes, rows: &Rows) -> Self {
        let row_bytes = data.len() / rows.stored().max(1);
        let strip_rows = (STRIP / row_bytes.max(1)).max(1);
        let mut left = vec![0; rows.stored().div_ceil(strip_rows)];
        (0..rows.count()).for_each(|row| left[rows.source(row) / strip_rows] += 1);
        Self { data, row_bytes, strip_rows, left: left.into_iter().map(AtomicUsize::new).collect() }
    }

    /// Stored row `row` has been read.
    pub(crate) fn read(&self, row: usize) {
        let strip = row / self.strip_rows;
        if self.left[strip].fetch_sub(1, Ordering::Relaxed) == 1 {
            let bytes = self.strip_rows * self.row_bytes;
            self.data.release(strip * bytes..((strip + 1) * bytes).min(self.data.len()));
        }
    }
}
