//! The door is the TLS handshake: whose key is not admitted gets no further, however sound it is.
//! Nobody gets in without showing a certificate at all, either.

use hearthnet_bus::NodeKey;

use crate::raw::Papers;
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 15;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let failed = |error| HarnessError::Attacker(format!("{error}"));
        for _ in 0..8 {
            let stranger = NodeKey::generate().map_err(failed)?;
            let mut peer = bench.secured_with(&Papers::of(&stranger.secret())).await?;
            found.shut_out("a stranger", "unauthorized", &peer.upgrade().await?);
        }
        let answer = bench.secured_with(&Papers::none()).await?.upgrade().await?;
        let held = !answer.starts_with("HTTP/");
        found.check("nobody in particular", "no session", answer, held);
        Ok(found.verdict())
    }
}
