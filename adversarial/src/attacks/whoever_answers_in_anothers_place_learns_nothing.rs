//! An address is a hint: anybody may come to listen there. A caller must find out before it says a
//! word whether it is the host that it means, by a key that it knows, and not by a certificate,
//! which anybody can show. Here the one under attack is a caller, in a process of its own.

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
        // It has no key of its own to be mistaken for: the handshake itself is wrong.
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
        found.same(format!("{what}: callers that came"), 1, came);
        let (handshakes, bytes) = (seen(&impostor.seen.handshakes), seen(&impostor.seen.bytes));
        let heard = format!("{handshakes} handshakes, {bytes} bytes");
        found.same(
            format!("{what}: what it heard"),
            "0 handshakes, 0 bytes",
            heard,
        );
    }

    // Who only hands on what is said cannot be told from the network, and does no harm: at
    // the same place, the same caller finds the host that it means.
    let relay = Impostor::listen(Trick::Relay(target.addr)).await?;
    let called = bench.call(&honest(relay.addr)).await?;
    let what = "the host itself, by way of somebody else";
    found.done(what, "a session", called.refused.map_or(Ok(()), Err));
    Ok(())
}
