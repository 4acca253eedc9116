//! `hearthnet page`: the address of the running node's page.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cli::args::Global;
use crate::cli::{Failure, block_on, failure, print};
use crate::home::Lock;
use crate::node::{NODE_STATUS, Running, local_api};

/// Time limit of `--wait`: loading a model may take as long.
const STARTING: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(250);

pub(crate) fn run(open: bool, wait: bool, global: &Global) -> Result<(), Failure> {
    let url = block_on(find(global, wait))?;
    if open {
        return open_browser(&url);
    }
    print(format!("{url}\n"))
}

/// Address of the page of the node that runs on this home.
async fn find(global: &Global, wait: bool) -> Result<String, Failure> {
    let dir = global.dir()?;
    let until = Instant::now() + if wait { STARTING } else { Duration::ZERO };
    loop {
        if Lock::is_held(&dir) {
            let running: Option<Running> = local_api::ask(&dir, NODE_STATUS, &json!({})).await;
            if let Some(url) = running.and_then(|running| running.url) {
                return Ok(url.trim_end_matches("v1").to_owned());
            }
        }
        if Instant::now() >= until {
            return Err(failure!(Host, "no node with a page runs here")
                .code("no_page")
                .hint("`hearthnet up` starts it"));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Whether there is a desktop on which a browser could open.
pub(super) fn can_open() -> bool {
    ["DISPLAY", "WAYLAND_DISPLAY"]
        .into_iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

fn open_browser(url: &str) -> Result<(), Failure> {
    let opener = Command::new("xdg-open")
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match opener {
        Ok(status) if status.success() => Ok(()),
        _ => Err(failure!(Host, "no browser could be opened").hint(format!("open {url} yourself"))),
    }
}
