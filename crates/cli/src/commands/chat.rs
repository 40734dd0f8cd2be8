//! `lmx chat`: a conversation.
//!
//! Each turn renders the whole conversation through the chat template; the engine keeps what it computed, so that
//! only the part that is new is run. After a reply the closed turn is run too: the cache then holds exactly the
//! template of the conversation, one system block and one BOS, whatever ended the reply.

use crate::args::chat::{ChatArgs, ChatOptions};
use crate::chat::conversation::Conversation;
use crate::chat::input::{self, Line, Lines};
use crate::chat::words::{self, Command};
use crate::end::End;
use crate::env;
use crate::report::{self, Notices};
use crate::running::{self, Outcome};
use crate::session::{Concurrency, Models, Reuse, Session, Tail, notice_dropped_system};
use crate::terminal::{self, Reply};
use anyhow::anyhow;
use lmx::engine::{FinishReason, Request};
use lmx::grammar::Grammar;
use std::io::IsTerminal;
use std::path::Path;

/// Runs the command.
pub(crate) fn run(options: &ChatOptions) -> Result<(), End> {
    let args = &options.args;
    let mut notices = Notices::new(false);
    let session = Session::open(
        Models { model: &args.model, draft: args.speculation.draft_model(), progress: None },
        &args.adapter,
        &args.run,
        &args.template,
        Reuse::Prefixes(&args.prefix),
        Concurrency::of(1),
        &mut notices,
    )?;
    if let Err(error) = &session.template {
        let help = "a model without a chat template chats with --use-default-chat-template";
        return Err(End::Failed(anyhow!("{error} ({help})")));
    }
    session.check_speculation(options.speculation)?;
    session.notice_quantization_out_of_reach(0, None, &mut notices);
    report::filters_without_effect(&options.sampling, &options.processors, &mut notices);
    if args.pipeline {
        notices.add("--pipeline has no effect: lmx runs in one process");
    }
    let typed = std::io::stdin().is_terminal();
    if typed {
        introduce(args);
    }
    let grammar = session.grammar(options.form.as_ref())?;
    let conversation = Conversation::new(args.template.system_prompt.clone());
    let mut chat = Chat { options, session, grammar, conversation, notices, replies: 0, typed };
    let history = env::state_dir().filter(|_| !args.no_history).map(|folder| folder.join("chat_history"));
    let mut lines = input::open(history)?;
    chat.talk(&mut *lines)
}

/// What a person is told at the start.
fn introduce(args: &ChatArgs) {
    let limit = args.max_tokens.0.map_or_else(|| "no limit".to_owned(), |n| n.to_string());
    terminal::say(&format!("model       {}", args.model.name()));
    if let Some(adapter) = &args.adapter.adapter_path {
        terminal::say(&format!("adapter     {adapter}"));
    }
    terminal::say(&format!("max tokens  {limit}"));
    if let Some(system) = &args.template.system_prompt {
        terminal::say(&format!("system      {system}"));
    }
    terminal::say("commands    q exit   r reset   h help");
}

struct Chat<'a> {
    options: &'a ChatOptions,
    session: Session,
    /// The form of every reply.
    grammar: Option<Grammar>,
    conversation: Conversation,
    notices: Notices,
    /// Replies so far; each draws from a seed of its own.
    replies: u64,
    /// A person types: an error is shown and the session goes on. Else it ends the session.
    typed: bool,
}

impl Chat<'_> {
    fn talk(&mut self, lines: &mut dyn Lines) -> Result<(), End> {
        loop {
            let result = match input::next_message(lines)? {
                Line::End => return Ok(()),
                Line::Interrupted => continue,
                Line::Text(text) => match words::command(&text) {
                    Ok(Some(Command::Quit)) => return Ok(()),
                    Ok(Some(command)) => self.obey(&command),
                    Ok(None) => {
                        let turn = self.turn(&text);
                        self.session.note_prefix_warnings(&mut self.notices);
                        turn
                    }
                    Err(wrong) => Err(End::Failed(anyhow!(wrong))),
                },
            };
            match result {
                Err(end @ End::Failed(_)) if self.typed => {
                    end.message().into_iter().for_each(|message| terminal::say(&message));
                }
                other => other?,
            }
        }
    }

    fn obey(&mut self, command: &Command) -> Result<(), End> {
        match command {
            Command::Help => words::HELP.lines().for_each(terminal::say),
            Command::Reset => {
                self.conversation.reset();
                self.session.engine.clear_prefixes();
                terminal::say("the conversation is reset");
            }
            Command::System(text) => {
                self.conversation.set_system(*text);
                terminal::say(if text.is_some() {
                    "the system prompt is set"
                } else {
                    "there is no system prompt"
                });
            }
            Command::Save(file) => {
                self.conversation.save(Path::new(file))?;
                terminal::say(&format!("saved to {file}"));
            }
            Command::Quit => {}
        }
        Ok(())
    }

    /// One question and its reply.
    fn turn(&mut self, question: &str) -> Result<(), End> {
        self.conversation.ask(question);
        let mut reply = Reply::default();
        let outcome = match self.reply(&mut reply) {
            Ok(outcome) => outcome,
            Err(end) => {
                // The session can go on as if it had not been asked.
                self.conversation.take_back();
                reply.finish()?;
                return Err(end);
            }
        };
        reply.finish()?;
        self.conversation.answer(&outcome.text);
        self.say_outcome(&outcome);
        self.close_turn()
    }

    fn reply(&mut self, reply: &mut Reply) -> Result<Outcome, End> {
        let args = &self.options.args;
        let prompt = self.session.render(&self.conversation.messages(), Tail::Reply, None)?;
        notice_dropped_system(&prompt, &mut self.notices);
        let request = Request {
            tokens: prompt.ids,
            max_tokens: args.max_tokens.0,
            sampling: self.session.sampling(&self.options.sampling),
            processors: self.options.processors.clone(),
            stop: self.options.stop.clone(),
            grammar: self.grammar.clone(),
            adapter: self.session.adapter.clone(),
            speculation: self.options.speculation,
            seed: Some(args.seed.wrapping_add(self.replies)),
            ..Request::default()
        };
        self.replies += 1;
        running::run(&mut self.session.engine, request, &mut |text| reply.push(text))
    }

    /// Brings the cache to the template of the whole conversation, the reply's end included.
    fn close_turn(&mut self) -> Result<(), End> {
        let tokens = self.session.render(&self.conversation.messages(), Tail::Closed, None)?.ids;
        if tokens.len() > self.session.engine.model().context_length() {
            // The context is full; the next question will be told.
            return Ok(());
        }
        let request = Request { adapter: self.session.adapter.clone(), ..Request::new(tokens, 0) };
        running::run(&mut self.session.engine, request, &mut |_| Ok(())).map(drop)
    }

    fn say_outcome(&self, outcome: &Outcome) {
        match outcome.finish {
            None => terminal::note("the reply was stopped"),
            Some(FinishReason::Length) => terminal::note(&report::cut(self.options.args.max_tokens, outcome)),
            Some(FinishReason::Stop) => {}
        }
        let stats = &outcome.stats;
        terminal::say(&format!(
            "  {} tokens · {:.1} tok/s · prompt {} tokens, {} cached, {:.1} tok/s · peak {:.2} GB",
            stats.generation_tokens,
            stats.generation_tps(),
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.prompt_tps(),
            report::gigabytes(report::peak_memory()),
        ));
    }
}
