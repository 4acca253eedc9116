//! One NaN in a row makes every later answer of its sequence NaN. It is found before the engine
//! sees it; the stream ends, and the caller is told that the host before this one is at fault.

use crate::raw::{Step, kind};
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let width = bench.target.width;
    let (first, last) = (0, width as usize - 1);
    for (what, at, bits) in [
        ("infinity in the first place", first, 0x7c00u16),
        ("negative infinity in the last place", last, 0xfc00),
        ("a quiet NaN", last, 0x7e00),
        ("a signalling NaN", first, 0x7c01),
        ("a NaN with every bit set", last / 2, 0xffff),
    ] {
        // Three rows, of which the second one is bad.
        let mut values = vec![0x3c00u16; 3 * width as usize];
        if let Some(value) = values.get_mut(width as usize + at) {
            *value = bits;
        }
        let step = Step {
            rows: 3,
            width,
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ..Step::default()
        };
        let mut peer = bench.stream().await?;
        peer.send(step.frame()).await;
        found.refused(what, "tensor_nonfinite", &peer.receive().await);
        // The session goes on, and the stream can begin anew.
        peer.send(bench.stream_open(2)).await;
        let next = peer.receive().await;
        let opened = next.is(kind::STREAM_OPENED);
        found.holds("another stream afterwards", "opened", opened);
    }
    Ok(())
}
