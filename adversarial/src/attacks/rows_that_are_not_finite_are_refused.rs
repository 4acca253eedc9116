//! One NaN in a row turns all later results of its sequence into NaN. The host detects it before
//! the engine does, ends the stream, and reports that the preceding host is at fault.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let width = bench.target.width;
    let (first, last) = (0, width as usize - 1);
    for (what, at, bits) in [
        ("infinity at the first position", first, 0x7c00u16),
        ("negative infinity at the last position", last, 0xfc00),
        ("a quiet NaN", last, 0x7e00),
        ("a signalling NaN", first, 0x7c01),
        ("a NaN with every bit set", last / 2, 0xffff),
    ] {
        // Three rows, of which the second one is invalid.
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
        found.refused(what, "tensor_nonfinite", &peer.ask(step.frame()).await);
        // The session stays open, and a new stream works.
        let next = peer.ask(bench.stream_open(2)).await;
        let opened = next.is(kind::STREAM_OPENED);
        found.holds("another stream afterwards", "opened", opened);
    }
    Ok(())
}
