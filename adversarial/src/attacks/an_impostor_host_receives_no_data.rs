//! An address is only a hint: another node may come to listen there. Before it sends any data, a
//! caller must verify that the peer is the intended host, by a known key and not by a certificate,
//! which is public. Here the party under attack is a caller, in a process of its own.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_orchestrator::link::HostAddr;

use crate::bench::new_key;
use crate::raw::{Credentials, Impostor, Trick};
use crate::{Bench, Findings, HarnessError};

const CODE: &str = "identity_mismatch";

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let target = bench.target;

    let honest = |at: SocketAddr| HostAddr {
        endpoint: at.to_string(),
        node: target.node,
    };
    let own = new_key()?;
    let identity = own.identity()?;
    let real = bench.secured().await?.certificate()?;
    for (what, certificate, code) in [
        ("another node", identity.certificate().to_vec(), Some(CODE)),
        // The impostor has no key of its own: the handshake signature is wrong.
        ("another node with the host's certificate", real, None),
    ] {
        let shown = Credentials::forged(&certificate, &own.secret());
        let impostor = Impostor::listen(Trick::Answer(Box::new(shown))).await?;
        let called = bench.call(&honest(impostor.addr)).await?;
        let refused = called.refused.as_deref().unwrap_or("a session");
        let held = called.refused.is_some() && code.is_none_or(|code| refused.contains(code));
        found.check(what, code.unwrap_or("no session"), refused, held);
        if let Some(code) = code {
            let count = called.raised.get(code).copied().unwrap_or(0);
            found.same(format!("the caller's count of {code}"), 1, count);
        }
        let seen = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let came = seen(&impostor.seen.connections);
        found.same(format!("{what}: connections of callers"), 1, came);
        let (handshakes, bytes) = (seen(&impostor.seen.handshakes), seen(&impostor.seen.bytes));
        let heard = format!("{handshakes} handshakes, {bytes} bytes");
        found.same(
            format!("{what}: bytes that it received"),
            "0 handshakes, 0 bytes",
            heard,
        );
    }

    // A relay cannot be told from the network and does no harm: the caller reaches the intended
    // host through it.
    let relay = Impostor::listen(Trick::Relay(target.addr)).await?;
    let called = bench.call(&honest(relay.addr)).await?;
    let what = "the host itself, through a relay";
    found.done(what, "a session", called.refused.map_or(Ok(()), Err));
    Ok(())
}
