//! Opens this home's community for a command. Restores a lost log from any reachable member.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::log::EventLog;

use super::transient;
use crate::cli::{Failure, Kind, block_on, failure, no_thread, note};
use crate::config::{Config, Context};
use crate::home::{Home, LOG_FILE, Lock, Membership, OnDisk, key_status};

/// Time limit of the search for members. A member at its known address answers within a second;
/// mDNS may take a few.
const WAIT: Duration = Duration::from_secs(20);

/// Opens this node's community.
///
/// # Errors
/// Returns [`Kind::Community`] if the node is in none.
pub(crate) fn open_home(cx: &Context) -> Result<Home, Failure> {
    find_home(cx)?.ok_or_else(no_community)
}

/// Error of a command that needs a community.
pub(crate) fn no_community() -> Failure {
    Failure::new(Kind::Community, "this node is not in a community")
        .code("no_community")
        .hint("found one with `hearthnet community create NAME`, or join one with `hearthnet community join CODE`")
}

/// Opens this node's community, if it is in one. First restores a log that was lost or damaged
/// beyond repair from other members.
pub(crate) fn find_home(cx: &Context) -> Result<Option<Home>, Failure> {
    let dir = cx.global.dir()?;
    let mut home = match Home::on_disk(&cx.global, &dir)? {
        OnDisk::Here(home) => home,
        OnDisk::Lost(noted) => restore_log(cx, &dir, &noted)?,
        OnDisk::Nothing => return Ok(None),
    };
    home.passphrase_file.clone_from(&cx.global.passphrase_file);
    Membership::note(&dir, &home.state(), &home.key.id());
    key_status::warn_before_command(&home);
    Ok(Some(home))
}

/// Restores the log of `noted` into `dir`.
///
/// # Errors
/// Returns [`Kind::Community`] if no member was found, or if a node still runs on the deleted file.
fn restore_log(cx: &Context, dir: &Path, noted: &Membership) -> Result<Home, Failure> {
    if Lock::is_held(dir) {
        return Err(failure!(
            Community,
            "the log of {:?} was removed from {} while a node runs on it",
            noted.name,
            dir.display()
        )
        .code("log_lost")
        .hint("stop the node and start it again: it restores the log from other members"));
    }
    let name = &noted.name;
    note(format!(
        "the log of {name:?} was lost on this machine; asking other members for it"
    ));
    let key = Arc::new(cx.global.node_key()?);
    let log = match dir.join(LOG_FILE).exists() {
        true => EventLog::open(dir),
        false => EventLog::prepare_again(dir, noted.community),
    }?;
    let home = Home::new(dir.to_owned(), key, log);
    // A separate thread, because the caller may already be inside a runtime.
    let filled = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("restore-log".into());
        let filling = thread.spawn_scoped(scope, || block_on(fill_log(&home, &cx.config)));
        filling
            .map_err(|e| no_thread(&e))?
            .join()
            .unwrap_or_else(|_| Err(Failure::internal("the log could not be restored")))
    });
    if !filled? {
        return Err(failure!(
            Community,
            "the log of {name:?} was lost on this machine, and no other member was found in {} s",
            WAIT.as_secs()
        )
        .code("log_lost")
        .hint("run `hearthnet up` in another home of the community and try again; or leave the community with `hearthnet community leave`"));
    }
    let events: u64 = home.log.heads().authors.values().map(|head| head.seq).sum();
    note(format!(
        "the log of {name:?} is back: {events} events from other members"
    ));
    Ok(home)
}

/// Whether a member sent a complete log.
async fn fill_log(home: &Home, config: &Config) -> Result<bool, Failure> {
    let node = transient::start(home, config).await?;
    let filled = tokio::time::timeout(WAIT, async {
        loop {
            node.until_in_sync().await;
            if home.state().is_created() {
                return;
            }
            // In sync with a member that has no events either.
            let _ = node.changes().changed().await;
        }
    })
    .await;
    node.shutdown().await;
    Ok(filled.is_ok())
}
