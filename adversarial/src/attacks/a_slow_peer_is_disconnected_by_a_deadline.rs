//! Slowness is cheap for the attacker and holds sockets and buffers of the host. Every phase of a
//! connection has a deadline, and a message that has begun must arrive at a minimum rate, so that a
//! byte now and then does not keep a connection alive.

use std::future::Future;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::prelude::*;

/// Pause between two bytes. At the minimum rate of 16 KiB/s, 1,600 bytes would arrive in this time.
const PAUSE: Duration = Duration::from_millis(100);

/// Twelve times the longest deadline of these phases.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Whether the host ends a silent TCP connection.
async fn silent_tcp(bench: &Bench) -> Result<bool> {
    let mut tcp = TcpStream::connect(bench.target.addr).await?;
    let read = timeout(TIMEOUT, tcp.read(&mut [0; 64])).await;
    Ok(read.is_ok())
}

/// End of a silent connection.
async fn silent(peer: impl Future<Output = Result<Peer>>) -> Result<Ending> {
    Ok(peer.await?.ending().await)
}

/// End of a connection after one frame.
async fn sent(peer: impl Future<Output = Result<Peer>>, frame: Frame) -> Result<Ending> {
    let mut peer = peer.await?;
    peer.send(frame).await;
    Ok(peer.ending().await)
}

/// End of a connection on which a frame arrives byte by byte.
async fn trickled(
    peer: impl Future<Output = Result<Peer>>,
    frame: &Frame,
    sequence: u32,
) -> Result<Ending> {
    let message = Message::binary(frame.encode(sequence)).encode();
    Ok(peer.await?.trickle(&message, PAUSE).await)
}

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let bench = &*bench;
    // The first of a tensor's two chunks, and a step that names the tensor. The second chunk never
    // arrives.
    let data = chunk(1, dtype::I8, &[2 << 20], &vec![0; 1 << 20]);
    let half = Frame::new(kind::TENSOR_DATA, data);
    let announced = Step {
        tensor: Some(1),
        data: Vec::new(),
        ..bench.zeros(1, 64)
    };
    let hello = bench.hello("pipeline")?.frame();
    let long = Frame::new(kind::DESCRIBE, vec![0; 4000]);
    // Concurrently, because each takes its full deadline.
    let (tcp, tls, upgraded, slow_hello, half, announced, slow) = tokio::join!(
        silent_tcp(bench),
        silent(bench.secured()),
        silent(bench.upgraded()),
        trickled(bench.upgraded(), &hello, 1),
        sent(bench.pipeline(), half),
        sent(bench.stream(), announced.frame()),
        trickled(bench.pipeline(), &long, 2),
    );
    let endings: [(&str, Result<Ending>); 5] = [
        ("silence after the upgrade", upgraded),
        ("a HELLO byte by byte", slow_hello),
        ("silence between two chunks", half),
        ("silence after a step that names a tensor", announced),
        ("a frame byte by byte", slow),
    ];
    let tcp = tcp?;
    found.holds("silence on TCP", "ended", tcp);
    let tls = tls?;
    found.check("silence after TLS", "ended", &tls, !tls.hung);
    for (what, ending) in endings {
        found.ended(what, CloseCode::PipelineStalled, &ending?);
    }
    Ok(())
}
