//! This home's community, opened for a command. A log that was lost is made anew, and filled from
//! any member that can be found.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::log::EventLog;

use crate::community::{Home, LOG_FILE, OnDisk};
use crate::config::Config;
use crate::context::Context;
use crate::failure::{Failure, Kind};
use crate::lock::Lock;
use crate::membership::Membership;
use crate::output::note;
use crate::runtime::{block_on, no_thread};

/// How long members are looked for. One that is where it was answers within a second; mDNS may
/// take a few.
const WAIT: Duration = Duration::from_secs(20);

impl Home {
    /// This node's community.
    ///
    /// # Errors
    /// [`Kind::Community`] if it is in none.
    pub(crate) fn open(cx: &Context) -> Result<Self, Failure> {
        Self::find(cx)?.ok_or_else(|| {
            Failure::new(Kind::Community, "this node is not in a community")
                .code("no_community")
                .hint("found one with `hearthnet community create NAME`, or join one with `hearthnet community join CODE`")
        })
    }

    /// This node's community, if it is in one. A log that was lost or damaged beyond repair is
    /// filled again from other members first.
    pub(crate) fn find(cx: &Context) -> Result<Option<Self>, Failure> {
        let dir = cx.global.dir()?;
        let mut home = match Self::on_disk(&cx.global, &dir)? {
            OnDisk::Here(home) => home,
            OnDisk::Lost(noted) => refill(cx, &dir, &noted)?,
            OnDisk::Nothing => return Ok(None),
        };
        home.passphrase_file.clone_from(&cx.global.passphrase_file);
        Membership::note(&dir, &home.state(), &home.key.id());
        crate::standing::look(&home);
        Ok(Some(home))
    }
}

/// Brings the log of `noted` back into `dir`.
///
/// # Errors
/// [`Kind::Community`] if no member was found, or a node runs here on the file that was removed.
fn refill(cx: &Context, dir: &Path, noted: &Membership) -> Result<Home, Failure> {
    if Lock::is_held(dir) {
        return Err(Failure::new(
            Kind::Community,
            format!(
                "the log of {:?} was removed from {} while a node runs on it",
                noted.name,
                dir.display()
            ),
        )
        .code("log_lost")
        .hint("stop the node and start it again: it gets the log back from other members"));
    }
    note(format!(
        "the log of {:?} was lost on this machine; asking other members for it",
        noted.name
    ));
    let key = Arc::new(cx.global.node_key()?);
    let log = match dir.join(LOG_FILE).exists() {
        true => EventLog::open(dir),
        false => EventLog::prepare_again(dir, noted.community),
    }?;
    let home = Home::new(dir.to_owned(), key, log);
    // A thread of its own: whoever asks may be within a runtime already.
    let filled = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("refill".into());
        let filling = thread.spawn_scoped(scope, || block_on(fill(&home, &cx.config)));
        filling
            .map_err(|e| no_thread(&e))?
            .join()
            .unwrap_or_else(|_| Err(Failure::internal("the log could not be filled")))
    });
    if !filled? {
        return Err(Failure::new(
            Kind::Community,
            format!(
                "the log of {:?} was lost on this machine, and no other member was found in {} s",
                noted.name,
                WAIT.as_secs()
            ),
        )
        .code("log_lost")
        .hint("start `hearthnet serve` in another home of the community and try again; `hearthnet community leave` gives it up instead"));
    }
    let events: u64 = home.log.heads().authors.values().map(|head| head.seq).sum();
    note(format!(
        "the log of {:?} is back: {events} events from other members",
        noted.name
    ));
    Ok(home)
}

/// Whether a member gave all that it has.
async fn fill(home: &Home, config: &Config) -> Result<bool, Failure> {
    let node = crate::node::transient::start(home, config).await?;
    let filled = tokio::time::timeout(WAIT, async {
        loop {
            node.until_in_sync().await;
            if home.state().is_created() {
                return;
            }
            // Even with somebody who has nothing either.
            let _ = node.changes().changed().await;
        }
    })
    .await;
    node.shutdown().await;
    Ok(filled.is_ok())
}
