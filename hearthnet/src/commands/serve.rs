//! `hearthnet serve`: a node that stays, for the community and for programs on this machine.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::log::Level;
use serde_json::json;

use crate::args::{Global, RunArgs};
use crate::commands::shard::stop_requests;
use crate::commands::{print_bytes, print_json, runtime};
use crate::community::{Home, label};
use crate::config::Config;
use crate::failure::Failure;
use crate::node::Resident;
use crate::output::note;

pub(crate) fn run(args: RunArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    let home = Home::open(global)?;
    let level = home.level()?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut stop = stop_requests(args.lifeline)?;
        let registry = Arc::new(Registry::new());
        let caps = Vec::new();
        let resident =
            Resident::start(&home, config, args.listen.as_deref(), registry, caps).await?;
        ready(&args, &home, &resident, level)?;
        tokio::select! {
            _ = stop.recv() => {}
            failure = lost(&home) => {
                resident.stop().await;
                return Err(failure);
            }
        }
        if !args.json {
            note("stopping");
        }
        tokio::select! {
            () = resident.stop() => {}
            // Asked twice: at once, then.
            _ = stop.recv() => {}
        }
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

/// Resolves when this node has lost its place in the community.
async fn lost(home: &Home) -> Failure {
    let mut changes = home.log.changes();
    loop {
        if let Err(failure) = home.level() {
            return failure;
        }
        if changes.changed().await.is_err() {
            // The log outlives this task; nothing more will be heard.
            std::future::pending::<()>().await;
        }
    }
}

fn ready(args: &RunArgs, home: &Home, resident: &Resident, level: Level) -> Result<(), Failure> {
    let state = home.state();
    let addresses = resident.addresses();
    if args.json {
        return print_json(&json!({
            "node": home.key.id().to_string(),
            "community": state.name,
            "level": level,
            "addresses": addresses,
        }));
    }
    print_bytes(
        format!(
            "{} is in {:?} as {level}\n  address   {}\n  programs  {}\n",
            label(&state, &home.key.id()),
            state.name,
            addresses.join(", "),
            home.dir.join(hearthnet_bus::calls::ENDPOINT_FILE).display(),
        )
        .as_bytes(),
    )?;
    if level >= Level::Trusted {
        note("whoever has an invite code can join through this node");
    }
    Ok(())
}
