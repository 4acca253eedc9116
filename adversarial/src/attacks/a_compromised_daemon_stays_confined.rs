//! A daemon processes files and bytes of others for weeks. If one of them takes it over, the
//! attacker must not reach other files of its user, other programs or processes, or start with the
//! next login. Each action is tried in an isolated process and in one that is not isolated, which
//! proves that the isolation is what blocks it.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use super::prelude::*;
use crate::intruder::{Intruded, Intrusion, Part, furnish};

/// Time limit of an intruder process.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum number of actions that must succeed without isolation.
const WOULD_GO_WELL: usize = 12;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let open = intruded(bench, false).await?;
    let bound = intruded(bench, true).await?;
    let stands = &bound.stands;
    let (mut tries, mut would) = (0, 0);
    for (open, bound) in open.tried.iter().zip(&bound.tried) {
        let what = format!("a compromised daemon: {}", bound.what);
        let Some(part) = bound.by else {
            let went = bound.refused.is_none();
            found.check_or(what, "done", went, || {
                bound.refused.clone().unwrap_or_default()
            });
            continue;
        };
        tries += 1;
        if !is_there(part, stands) {
            let seen = format!("not carried out: the isolation is {stands}");
            found.check(what, "refused", seen, true);
            continue;
        }
        would += usize::from(open.refused.is_none());
        let seen = bound.refused.clone();
        let held = seen.is_some();
        found.check(what, "refused", seen.unwrap_or_else(|| "done".into()), held);
    }
    if !stands.contains("NOT") {
        let what = "attempts that succeed in a daemon without isolation";
        let expected = format!("at least {WOULD_GO_WELL} of {tries}");
        found.check(what, expected, would, would >= WOULD_GO_WELL);
    }
    Ok(())
}

/// Whether this kernel can enforce a part of the isolation.
fn is_there(part: Part, stands: &str) -> bool {
    match part {
        Part::Files => !stands.contains("files NOT"),
        Part::SystemCalls => !stands.contains("system calls NOT"),
        Part::Rights => true,
    }
}

/// Runs an intruder in a home directory of its own and returns its results.
async fn intruded(bench: &Bench, isolated: bool) -> Result<Intruded> {
    let folder = tempfile::tempdir()?;
    let (home, elsewhere) = (folder.path().join("home"), folder.path().join("elsewhere"));
    std::fs::create_dir_all(&elsewhere)?;
    for file in ["file", "other"] {
        std::fs::write(elsewhere.join(file), "the system's")?;
    }
    furnish(&home)?;
    let name = folder.path().display().to_string();
    let _listening = listen(&name)?;
    let plan = Intrusion {
        home: home.clone(),
        elsewhere,
        abstract_name: name,
        isolated,
    };
    let intruding = Command::new(bench.program())
        .arg("intruder")
        .arg(serde_json::to_string(&plan)?)
        .env_clear()
        .env("HOME", &home)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(TIMEOUT, intruding).await??;
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let said = String::from_utf8_lossy(&output.stderr);
        HarnessError::attacker(format!("no intruder: {error}: {said}"))
    })
}

/// Stands for a service of the user's session on an abstract socket, which has no path.
fn listen(name: &str) -> Result<std::os::unix::net::UnixListener> {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    let at = SocketAddr::from_abstract_name(name)?;
    Ok(UnixListener::bind_addr(&at)?)
}
