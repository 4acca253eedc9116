//! `hearthnet serve`: a node that stays, for the community and for programs on this machine.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::log::Level;
use serde_json::json;

use crate::answers;
use crate::args::{Global, RunArgs};
use crate::commands::shard::{DRAIN_DEADLINE, stop_requests};
use crate::commands::{OpenModel, open_model, print_bytes, print_json, runtime};
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
        let model = chat_model(&args, &home, global, config);
        let caps = model.iter().map(|_| answers::cap()).collect();
        let resident =
            Resident::start(&home, config, args.listen.as_deref(), registry, caps).await?;
        let handle = tokio::runtime::Handle::current();
        let chats = match model {
            Ok(model) => Some(answers::offer(&handle, &resident, &home, model, config)?),
            Err(why) => {
                note(format!("no chats for programs on this machine: {why}"));
                None
            }
        };
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
        let leave = async {
            if let Some(chats) = &chats {
                chats.drain(DRAIN_DEADLINE).await;
            }
            resident.stop().await;
        };
        tokio::select! {
            () = leave => {}
            // Asked twice: at once, then.
            _ = stop.recv() => {}
        }
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

/// The model for chats, if there are to be any.
fn chat_model(
    args: &RunArgs,
    home: &Home,
    global: &Global,
    config: &Config,
) -> Result<OpenModel, Failure> {
    home.require_research(config)?;
    open_model(global, &args.model)
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
