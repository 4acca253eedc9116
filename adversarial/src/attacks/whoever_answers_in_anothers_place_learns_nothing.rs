//! An address is a hint: anybody may come to listen there. A caller must find out before it says a
//! word whether it is the host that it means, by a key that it knows, and not by a certificate,
//! which anybody can show. Here the one under attack is a caller, in a process of its own.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use hearthnet_bus::NodeKey;
use hearthnet_orchestrator::link::HostAddr;

use crate::raw::{Impostor, Papers, Trick};
use crate::{Bench, Findings, HarnessError, Verdict};

const CODE: &str = "identity_mismatch";

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 16;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let target = *bench.target();
        let failed = |error: &dyn std::fmt::Display| HarnessError::Attacker(error.to_string());
        let key = || NodeKey::generate().map_err(|error| failed(&error));
        let honest = |at: SocketAddr| HostAddr {
            endpoint: at.to_string(),
            node: target.node,
        };
        let own = key()?;
        let identity = own.identity().map_err(|error| failed(&error))?;
        let real = bench.secured().await?.certificate()?;
        for (what, certificate, code) in [
            ("another node", identity.certificate().to_vec(), Some(CODE)),
            // It has no key of its own to be mistaken for: the handshake itself is wrong.
            ("another node with the host's certificate", real, None),
        ] {
            let shown = Papers::forged(&certificate, &own.secret());
            let impostor = Impostor::listen(Trick::Answer(Box::new(shown))).await?;
            let called = bench.call(&honest(impostor.addr)).await?;
            let refused = called.refused.as_deref().unwrap_or("a session");
            let held = called.refused.is_some() && code.is_none_or(|code| refused.contains(code));
            found.check(what, code.unwrap_or("no session"), refused, held);
            if let Some(code) = code {
                let count = called.raised.get(code).copied().unwrap_or(0);
                found.check(
                    format!("the caller's count of {code}"),
                    "1",
                    count,
                    count == 1,
                );
            }
            let seen = |of: &std::sync::atomic::AtomicU64| of.load(Ordering::Relaxed);
            let came = seen(&impostor.seen.connections);
            found.check(format!("{what}: callers that came"), "1", came, came == 1);
            let learned = (seen(&impostor.seen.handshakes), seen(&impostor.seen.bytes));
            let said = format!("{} handshakes, {} bytes", learned.0, learned.1);
            let what = format!("{what}: what it heard");
            found.check(what, "0 handshakes, 0 bytes", said, learned == (0, 0));
        }

        // Who only hands on what is said cannot be told from the network, and does no harm: at
        // the same place, the same caller finds the host that it means.
        let relay = Impostor::listen(Trick::Relay(target.addr)).await?;
        let called = bench.call(&honest(relay.addr)).await?;
        let held = called.refused.is_none();
        let seen = called.refused.unwrap_or_else(|| "a session".to_owned());
        found.check(
            "the host itself, by way of somebody else",
            "a session",
            seen,
            held,
        );
        Ok(found.verdict())
    }
}
