//! Access is decided in the TLS handshake: a valid key that is not admitted gets no session, and
//! neither does a client without a certificate.

use super::prelude::*;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
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
    found.check("a client without a certificate", "no session", answer, held);
    Ok(())
}
