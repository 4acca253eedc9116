//! A home also answers its neighbours. Neighbours with long chats, running and queued, must not
//! block the service for the owner of the machine.

use hearthnet_orchestrator::chat::{ChatRequest, Prompt};
use hearthnet_orchestrator::service::ServiceSettings;
use serde_json::json;
use tokio::time::timeout;

use super::prelude::*;
use crate::fleet::question;
use crate::household::{MODEL, SOON, local_api, service};

/// Length of a neighbour's answer. The neighbour does not read it, so its chat does not end.
const LONG: u32 = 4000;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let service = service()?;
    let (folder, _api) = local_api(Some(&service)).await?;
    let owner = Client::connect_local(folder.path()).await?;
    let limits = ServiceSettings::default().turns;
    let mut chats = Vec::new();
    let long = ChatRequest {
        prompt: Prompt::Text("hello".to_owned()),
        ..question(0, LONG)
    };
    // Each caller is a different one, so that no limit per caller applies.
    while let Ok(chat) = service.ask(new_key()?.id().to_string().as_str(), MODEL, long.clone()) {
        chats.push(chat);
    }
    let most = limits.places + limits.reserved + limits.waiting;
    let what = "running and queued neighbours before the first refusal";
    found.same(what, most, chats.len());
    let params = json!({ "prompt": "hello", "max_tokens": 4 });
    for n in 1..=2 {
        let call = owner.call(&Capability::chat(), &params)?;
        let answered = timeout(SOON, call.result()).await;
        let answered = answered.map_err(|_| "no answer".to_owned());
        let answered = answered.and_then(|end| end.map_err(|e| e.code().to_string()));
        let what = format!("chat {n} of the owner beside them");
        found.done(what, "answered", answered);
    }
    let load = service.load();
    let all = load.running == limits.places + limits.reserved;
    found.check("neighbours' chats go on", "all", load.running, all);
    drop(chats);
    Ok(())
}
