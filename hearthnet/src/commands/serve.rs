//! `hearthnet serve`: a node that stays, for the community and for programs on this machine.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Registry;
use hearthnet_bus::log::Level;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::http::{HttpServer, Part};
use serde_json::json;

use crate::answers;
use crate::args::{Global, RunArgs};
use crate::chat_service::{close, count, open_http};
use crate::commands::serve_by_hand;
use crate::commands::shard::stop_requests;
use crate::commands::{OpenModel, open_model, print_bytes, print_json, runtime};
use crate::community::{Home, label};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::node::Resident;
use crate::output::note;

/// How long chats that run may take to end when the program is asked to stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

pub(crate) fn run(args: RunArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    if args.door.by_hand() {
        return serve_by_hand::run(args, global, config);
    }
    let home = Home::open(global)?;
    let level = home.level()?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let mut stop = stop_requests(args.lifeline)?;
        count(Part::Caller)?;
        let registry = Arc::new(Registry::new());
        let model = chat_model(&args, &home, global, config);
        let caps = model.iter().map(|_| answers::cap()).collect();
        let resident =
            Resident::start(&home, config, args.listen.as_deref(), registry, caps).await?;
        let handle = tokio::runtime::Handle::current();
        let chats = match model {
            Ok(model) => Some(answers::offer(&handle, &resident, &home, model, config)?),
            // Whoever names a door wants chats.
            Err(why) if args.door.http.is_some() => {
                resident.stop().await;
                return Err(why);
            }
            Err(why) => {
                note(format!("no chats for programs on this machine: {why}"));
                None
            }
        };
        let door = match &chats {
            Some(chats) => http_door(&args, chats, config).await?,
            None => None,
        };
        ready(&args, &home, &resident, level, door.as_ref())?;
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
            match (door, &chats) {
                (Some(door), Some(chats)) => close(door, chats).await,
                (None, Some(chats)) => chats.drain(DRAIN_DEADLINE).await,
                _ => {}
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

/// The HTTP door. One that nobody named is left shut when its port is taken.
async fn http_door(
    args: &RunArgs,
    chats: &Service,
    config: &Config,
) -> Result<Option<HttpServer>, Failure> {
    match open_http(chats, args.door.http.as_deref(), config).await {
        Ok(door) => Ok(Some(door)),
        Err(failure) if args.door.http.is_none() && failure.kind == Kind::Host => {
            note(format!("no HTTP for programs on this machine: {failure}"));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
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

fn ready(
    args: &RunArgs,
    home: &Home,
    resident: &Resident,
    level: Level,
    door: Option<&HttpServer>,
) -> Result<(), Failure> {
    let url = door.map(|door| format!("http://{}/v1", door.local_addr()));
    let state = home.state();
    let addresses = resident.addresses();
    if args.json {
        return print_json(&json!({
            "node": home.key.id().to_string(),
            "community": state.name,
            "level": level,
            "addresses": addresses,
            "url": url,
        }));
    }
    print_bytes(
        format!(
            "{} is in {:?} as {level}\n  address   {}\n  programs  {}{}\n",
            label(&state, &home.key.id()),
            state.name,
            addresses.join(", "),
            home.dir.join(hearthnet_bus::calls::ENDPOINT_FILE).display(),
            url.map_or_else(String::new, |url| format!("\n  OpenAI    {url}")),
        )
        .as_bytes(),
    )?;
    if level >= Level::Trusted {
        note("whoever has an invite code can join through this node");
    }
    Ok(())
}
