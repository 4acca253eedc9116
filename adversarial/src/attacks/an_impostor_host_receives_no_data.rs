//! An address is only a hint: another node may come to listen there. Before it sends any data, a
//! caller must verify that the peer is the intended host, by a known key and not by a certificate,
//! which is public. Here the party under attack is a caller.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::link::HostAddr;

use super::prelude::*;
use crate::victim::raised;

const CODE: &str = "identity_mismatch";

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let target = bench.target;

    let honest = |at: SocketAddr| HostAddr {
        endpoint: at.to_string(),
        node: target.node,
    };
    let numbers = Metrics::install(Part::Caller)?;
    let counted = || raised(&numbers.render()).get(CODE).copied().unwrap_or(0);
    let guest = &bench.guest;
    let call = async |host: HostAddr| HostLink::connect(&host, guest, Config::default()).await;
    let own = new_key()?;
    let identity = own.identity()?;
    let real = bench.secured().await?.certificate()?;
    for (what, certificate, code) in [
        ("another node", identity.certificate().to_vec(), Some(CODE)),
        // The impostor has no key of its own: the handshake signature is wrong.
        ("another node with the host's certificate", real, None),
    ] {
        let shown = Credentials::forged(&certificate, &own.secret());
        let impostor = Impostor::listen(&shown).await?;
        let before = counted();
        let refused = call(honest(impostor.addr)).await.err();
        let told = refused
            .as_ref()
            .map_or("a session".to_owned(), ToString::to_string);
        let held = refused.is_some() && code.is_none_or(|code| told.contains(code));
        found.check(what, code.unwrap_or("no session"), told, held);
        if let Some(code) = code {
            let count = counted() - before;
            found.same(format!("the caller's count of {code}"), 1, count);
        }
        let seen = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let came = seen(&impostor.seen.connections);
        found.same(format!("{what}: connections of callers"), 1, came);
        let (handshakes, bytes) = (seen(&impostor.seen.handshakes), seen(&impostor.seen.bytes));
        let heard = format!("{handshakes} handshakes, {bytes} bytes");
        let told = format!("{what}: bytes that it received");
        found.same(told, "0 handshakes, 0 bytes", heard);
    }

    // A relay cannot be told from the network and does no harm: the caller reaches the intended
    // host through it.
    let relay = Tap::listen(target.addr).await?;
    let called = call(honest(relay.addr)).await;
    found.done("the host itself, through a relay", "a session", called);
    Ok(())
}
