//! `hearthnet serve --shard ...` and `serve --local`: answers chats for other programs, outside of any
//! community.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_http::Part;
use hearthnet_orchestrator::{ChatError, Service};
use serde_json::json;

use crate::args::{Global, RunArgs};
use crate::commands::{node_key, open_model, print_bytes, print_json, runtime};
use crate::config::Config;
use crate::failure::Failure;
use crate::local_api::StandaloneApi;
use crate::output::note;
use crate::service_setup::{close, count, model_of, open_http, settings};
use crate::signals::stop_requests;

pub(crate) fn run(args: RunArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    if !args.door.local && !config.policy.research.enable {
        return Err(ChatError::ExperimentalDisabled.into());
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(serve(&args, global, config));
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

async fn serve(args: &RunArgs, global: &Global, config: &Config) -> Result<(), Failure> {
    // Signals count from here on: a Ctrl-C while loading ends the program cleanly, too.
    let mut stop = stop_requests(args.lifeline)?;
    count(Part::Caller)?;
    let mut model = open_model(global, config, args.model.as_ref(), None)?;
    let key = match args.door.local {
        true => None,
        false => Some(Arc::new(node_key(global)?)),
    };
    let served = tokio::select! {
        served = model_of(&args.door, &mut model, key, config) => served?,
        _ = stop.recv() => return Err(ChatError::Cancelled.into()),
    };
    let runtime = tokio::runtime::Handle::current();
    let service = Service::new(runtime, vec![served], settings(config));
    let data_dir = crate::paths::data_dir(global.data_dir.clone())?;
    let door = match StandaloneApi::open(&data_dir, &service, &model.path, config).await {
        Ok(door) => Some(door),
        // The HTTP interface is what this is for.
        Err(why) => {
            note(format!(
                "`hearthnet chat` will not find this service: {why}"
            ));
            None
        }
    };
    let server = open_http(&service, args.door.http.as_deref(), config).await?;
    let url = format!("http://{}/v1", server.local_addr());
    if args.json {
        print_json(&json!({"url": url, "models": [model.id], "pid": std::process::id()}))?;
    } else {
        print_bytes(
            format!(
                "answering with {}\n  OpenAI's interface  {url}\n  numbers             http://{}/metrics\n",
                model.id,
                server.local_addr(),
            )
            .as_bytes(),
        )?;
    }
    // Nobody but the signal handlers sends, and they end with the runtime.
    stop.recv().await;
    if !args.json {
        note("stopping: what is being answered is finished, new requests are refused");
    }
    let leave = async {
        close(server, &service).await;
        if let Some(door) = door {
            door.close().await;
        }
    };
    tokio::select! {
        () = leave => {}
        // Asked twice: at once, then.
        _ = stop.recv() => {}
    }
    Ok(())
}
