//! Credit is returned once for each chunk in flight. A peer that acknowledges chunks which were
//! never sent would widen the window beyond its grant.

use hearthnet_testkit::raw::violations::{ack, acks, nack};

use super::prelude::*;
use super::table::{breaking, carry_out};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let code = CloseCode::CreditAck;
    carry_out(bench, breaking(bench, acks()), found).await?;
    // The host sends one chunk and receives a false acknowledgement.
    type Payment = fn(u16) -> Vec<Frame>;
    let payments: [(&str, Payment); 5] = [
        ("an ACK of more than was sent", |id| vec![ack(id, 2, true)]),
        ("an ACK that is not final", |id| vec![ack(id, 1, false)]),
        ("an end without the credit", |id| vec![ack(id, 0, true)]),
        ("an ACK twice", |id| vec![ack(id, 1, true); 2]),
        ("an ACK, then a NACK", |id| vec![ack(id, 1, true), nack(id)]),
    ];
    for (what, payment) in payments {
        let mut peer = bench.session(&bench.hello("bench")?).await?;
        let body = chunk(1, dtype::I8, &[4], &[1, 2, 3, 4]);
        peer.send(Frame::new(kind::TENSOR_DATA, body).flags(flag::FINAL))
            .await;
        let id = loop {
            match peer.receive().await {
                Arrived::Frame {
                    kind: kind::TENSOR_DATA,
                    body,
                } => break body.first_chunk().copied().map_or(0, u16::from_be_bytes),
                Arrived::Frame { .. } => {}
                other => return Err(HarnessError::attacker(format!("no echo: {other:?}"))),
            }
        };
        for frame in payment(id) {
            peer.send(frame).await;
        }
        found.ended(what, code, &peer.ending().await);
    }
    Ok(())
}
