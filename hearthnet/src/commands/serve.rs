//! `hearthnet serve`: the daemon of a home, for the community and for programs on this machine.
//! With `--shard ...` or `--local` it answers other programs without a community.

use hearthnet_http::Part;
use hearthnet_orchestrator::{ChatError, Service};
use serde_json::json;

use crate::answering::chat_setup::{model_of, settings};
use crate::answering::http::{close, count, key_file, open_http, socket};
use crate::answering::local_service::StandaloneApi;
use crate::cli::args::{HostEngineArgs, RunArgs};
use crate::cli::{Failure, Kind, Stop, block_on, note, print_result};
use crate::config::Context;
use crate::daemon;
use crate::models::{open_any_model, open_model};
use crate::node::open_home;

pub(crate) fn run(args: RunArgs, cx: &Context) -> Result<(), Failure> {
    let host = &cx.config.research.distributed_inference.host;
    let layers =
        args.layers.is_some() || args.up || (host.serve_shards && !args.answers.is_standalone());
    if args.engine != HostEngineArgs::default() && !layers {
        return Err(Failure::new(
            Kind::Config,
            "--backend, --device and --dtype are for layers that this node serves, and it serves none",
        )
        .hint("add --layers LO-HI, or --layers auto"));
    }
    if !args.answers.is_standalone() {
        return daemon::run(&args, &open_home(cx)?, cx);
    }
    if !args.answers.local && !cx.config.policy.research.enable {
        return Err(ChatError::ExperimentalDisabled.into());
    }
    block_on(standalone(&args, cx))
}

async fn standalone(args: &RunArgs, cx: &Context) -> Result<(), Failure> {
    // Signals are handled from here on, so that Ctrl-C while loading ends the program cleanly.
    let stop = Stop::listen(args.lifeline)?;
    count(Part::Caller)?;
    let mut model = match args.answers.local {
        true => open_any_model(cx, args.model.as_ref())?,
        // Hosts have no layers of a model that makes vectors of whole texts.
        false => open_model(cx, args.model.as_ref(), None)?,
    };
    let served = tokio::select! {
        served = model_of(&args.answers, &mut model, cx) => served?,
        () = stop.asked() => return Err(ChatError::Cancelled.into()),
    };
    let runtime = tokio::runtime::Handle::current();
    let service = Service::new(runtime, vec![served], settings(&cx.config));
    let data_dir = cx.global.dir()?;
    let api = match StandaloneApi::open(&data_dir, &service, &cx.config).await {
        Ok(api) => Some(api),
        Err(why) if why.kind == Kind::Refused => return Err(why),
        // The HTTP interface is enough: `serve` continues without the local API.
        Err(why) => {
            note(format!(
                "`hearthnet chat` will not find this service: {why}"
            ));
            None
        }
    };
    let listen = args.answers.http.as_deref();
    let server = open_http(&service, None, listen, &data_dir, &cx.config).await?;
    let url = format!("{}/v1", server.url());
    if let Some(api) = &api {
        let key = key_file(&cx.config);
        let keys = server.named_keys();
        api.told.show_http(Some(url.clone()), key.as_deref(), keys);
    }
    let socket = socket(&cx.config);
    let ready = json!({
        "url": url, "socket": socket, "models": [model.id], "pid": std::process::id(),
    });
    print_result(args.json, &ready, || {
        let (id, at) = (&model.id, server.url());
        let socket = socket.map(|path| format!("  socket              {}\n", path.display()));
        format!(
            "answering with {id}\n  page                {at}\n  OpenAI's interface  {url}\n{}  metrics             {at}/metrics\n",
            socket.unwrap_or_default()
        )
    })?;
    stop.asked().await;
    if !args.json {
        note("stopping: running answers are finished, new requests are refused");
    }
    let leave = async {
        close(server, &service).await;
        if let Some(api) = api {
            api.close().await;
        }
    };
    tokio::select! {
        () = leave => {}
        // Second request to stop: end at once.
        () = stop.asked_twice() => {}
    }
    Ok(())
}
