//! A daemon reads files and bytes of others for weeks. Should one of them take it over, it must be of little use:
//! no other file of its user, no program, no other process, no way to be started with the next login.
//! What can be tried is tried twice, in a process that has given up its rights as the real program does, and
//! in one that has not: so each try is one that would go well.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::intruder::{Intruded, Intrusion, Part, furnish};
use crate::{Bench, Findings, HarnessError};

/// How long an intruder may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Tries that go well for whoever runs the suite, at least, where nothing is given up.
const WOULD_GO_WELL: usize = 12;

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let open = intruded(bench, false).await?;
    let bound = intruded(bench, true).await?;
    let stands = &bound.stands;
    let (mut tries, mut would) = (0, 0);
    for (open, bound) in open.tried.iter().zip(&bound.tried) {
        let what = format!("a daemon that was taken over: {}", bound.what);
        let Some(part) = bound.by else {
            let went = bound.refused.is_none();
            found.check_or(what, "done", went, || {
                bound.refused.clone().unwrap_or_default()
            });
            continue;
        };
        tries += 1;
        if !is_there(part, stands) {
            let seen = format!("not carried out, for there stands: {stands}");
            found.check(what, "refused", seen, true);
            continue;
        }
        would += usize::from(open.refused.is_none());
        let seen = bound.refused.clone();
        let held = seen.is_some();
        found.check(what, "refused", seen.unwrap_or_else(|| "done".into()), held);
    }
    if !stands.contains("NOT") {
        let what = "tries that go well in a daemon that has given up nothing";
        let expected = format!("at least {WOULD_GO_WELL} of {tries}");
        found.check(what, expected, would, would >= WOULD_GO_WELL);
    }
    Ok(())
}

/// Whether a part is one that this kernel can have.
fn is_there(part: Part, stands: &str) -> bool {
    match part {
        Part::Files => !stands.contains("files NOT"),
        Part::SystemCalls => !stands.contains("system calls NOT"),
        Part::Rights => true,
    }
}

/// What an intruder says of what it has tried, in a home of its own.
async fn intruded(bench: &Bench, isolated: bool) -> Result<Intruded, HarnessError> {
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
    let output = timeout(PATIENCE, intruding).await??;
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let said = String::from_utf8_lossy(&output.stderr);
        HarnessError::attacker(format!("no intruder: {error}: {said}"))
    })
}

/// A service of the user's session, which has no path.
#[cfg(target_os = "linux")]
fn listen(name: &str) -> Result<std::os::unix::net::UnixListener, HarnessError> {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    let at = SocketAddr::from_abstract_name(name)?;
    Ok(UnixListener::bind_addr(&at)?)
}

#[cfg(not(target_os = "linux"))]
fn listen(_: &str) -> Result<(), HarnessError> {
    Ok(())
}
