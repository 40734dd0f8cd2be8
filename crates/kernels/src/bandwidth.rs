//! How fast this machine reads memory: the limit of whatever streams through weights.

use crate::{AlignedBytes, Exec};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes that a thread takes at a time, so that the threads end together.
const PIECE: usize = 1 << 20;

/// Bytes per second that the threads of `exec` together read from a buffer of `bytes` (rounded down to 64), one figure
/// for each pass over it: there is one at least, and no further one after `time`. The buffer should be several times as
/// large as the last cache. All of it is written first, so that it takes memory.
#[must_use]
pub fn read_bandwidth(exec: &Exec, bytes: usize, time: Duration) -> Vec<f64> {
    let mut buffer = AlignedBytes::zeroed(bytes / 64 * 64);
    buffer.fill(1);
    let pieces: Vec<&[u8]> = buffer.chunks(PIECE).collect();
    let pass = || {
        let start = Instant::now();
        exec.pool.for_each(pieces.len(), &|piece| {
            black_box(sum(pieces[piece]));
        });
        buffer.len() as f64 / start.elapsed().as_secs_f64().max(1e-9)
    };
    let begin = Instant::now();
    let mut passes = vec![pass()];
    while begin.elapsed() < time {
        passes.push(pass());
    }
    passes
}

/// The sum of all eight-byte words, a cache line at a time: little enough work to wait for memory only.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0_u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(test)]
mod tests {
    use super::{read_bandwidth, sum};
    use crate::{Exec, Isa};
    use std::time::Duration;

    #[test]
    fn all_of_the_buffer_is_read_in_every_pass() {
        assert_eq!(sum(&[1; 192]), 24 * 0x0101_0101_0101_0101);
        let exec = Exec::new(Isa::best(), 2);
        assert_eq!(read_bandwidth(&exec, 3 << 20, Duration::ZERO).len(), 1);
        let measured = read_bandwidth(&exec, 3 << 20, Duration::from_millis(5));
        // From registers it would be faster than this, from a disk slower.
        assert!(measured.iter().all(|&speed| (1e6..1e13).contains(&speed)), "{measured:?}");
    }
}
