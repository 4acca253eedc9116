//! Access is decided in the TLS handshake: whose key is not admitted gets no further, however sound it is.
//! Nobody gets in without showing a certificate at all, either.

use crate::bench::new_key;

use crate::raw::Credentials;
use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    for _ in 0..8 {
        let credentials = Credentials::of(&new_key()?.secret());
        let mut peer = bench.secured_with(&credentials).await?;
        found.shut_out("a stranger", "unauthorized", &peer.upgrade().await?);
    }
    let answer = bench
        .secured_with(&Credentials::none())
        .await?
        .upgrade()
        .await?;
    let held = !answer.starts_with("HTTP/");
    found.check("nobody in particular", "no session", answer, held);
    Ok(())
}
