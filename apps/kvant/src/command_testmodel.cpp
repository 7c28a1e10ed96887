// kvant testmodel: small models with random weights, for tests and benchmarks.
#include <cstdio>
#include <memory>

#include "cli.h"
#include "kvant/test_model.h"

namespace kvant::cli {
namespace {

struct TestModelFlags {
  eval::TestModelOptions options;
  std::string kind = "key-bias", weights = "f32";
};

constexpr char kFooter[] =
    "\nExamples:\n"
    "  kvant testmodel --kind key-bias -o key-bias.gguf\n"
    "  kvant testmodel --kind planted -m model.gguf -o planted.gguf\n"
    "  kvant testmodel --kind shapes --layers 2 --heads 8 --kv-heads 2 --head-dim 128 -o shapes.gguf\n"
    "  kvant testmodel --kind shapes --head-dim 256 --kv-heads 1 --swa 512 -o windows.gguf\n"
    "  kvant testmodel --kind shapes --layers 8 --heads 8 --kv-heads 2 --head-dim 128 --embedding 1024 "
    "--feed-forward 2048 --weights q8_0 -o bars.gguf\n"
    "\nkey-bias: a model of the Qwen2 family whose key projections add +-60 to a few slowly rotating pairs "
    "of channels;\n"
    "4-bit caches that scale over tokens or groups lose everything else in them. planted: the model of -m "
    "with such "
    "biases\nin four channels of each KV head of its first and last layer; it still reads text. shapes: any "
    "head "
    "sizes; --swa gives\nlayers with a sliding window. Text makes no sense to random weights, but attention "
    "matters "
    "in them.\n";

int do_testmodel(TestModelFlags* f) {
  using eval::TestModelKind;
  if (f->options.path.empty())
    return fail({Code::kInvalidArgument, "--output: the name of a file is needed"});
  const Status output = check_output(f->options.path, {{"--model", f->options.tokenizer_from}});
  if (!output.ok()) return fail(output);
  f->options.kind = f->kind == "key-bias"  ? TestModelKind::kKeyBias
                    : f->kind == "planted" ? TestModelKind::kPlanted
                                           : TestModelKind::kShapes;
  if (f->options.kind == TestModelKind::kPlanted) {
    if (f->options.tokenizer_from.empty())
      return fail({Code::kInvalidArgument, "--kind planted needs the model whose weights it takes (-m)"});
    f->options.weights_from = f->options.tokenizer_from;
    f->options.biased_pairs = 2;
  }
  f->options.weights = f->weights == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F32;
  const Status status = eval::write_test_model(f->options);
  if (!status.ok()) return fail(status);
  return kOk;
}

}  // namespace

Command add_testmodel(CLI::App& root) {
  auto f = std::make_shared<TestModelFlags>();
  eval::TestModelOptions& o = f->options;
  CLI::App* app = root.add_subcommand("testmodel", "write a small model with random weights, for tests");
  app->footer(kFooter);
  app->add_option("--kind", f->kind, "what kind (default key-bias)")
      ->check(one_of({"key-bias", "planted", "shapes"}));
  app->add_option("-o,--output", o.path, "model file to write")->required()->type_name("FILE");
  app->add_option("-m,--model", o.tokenizer_from,
                  "take the tokenizer of this model (default: bytes), planted: all of it")
      ->check(readable_file())
      ->type_name("FILE");
  app->add_option("--layers", o.layers, "layers (default 2)")->check(whole_number(1, 256))->type_name("N");
  app->add_option("--heads", o.heads, "query heads (default 4)")->check(whole_number(1, 256))->type_name("N");
  app->add_option("--kv-heads", o.kv_heads, "KV heads (default 2)")
      ->check(whole_number(1, 256))
      ->type_name("N");
  app->add_option("--head-dim", o.head_dim, "channels of a head (default 64)")
      ->check(whole_number(32, 512))
      ->type_name("N");
  app->add_option("--swa", o.sliding_window, "sliding window of all but every sixth layer (default: none)")
      ->check(whole_number(0, 1 << 20))
      ->type_name("N");
  app->add_option("--ctx-train", o.context, "context that the model claims (default 32768)")
      ->check(whole_number(256, 1 << 24))
      ->type_name("N");
  app->add_option("--embedding", o.embedding,
                  "channels of the residual (default 256; key-bias: heads x head size)")
      ->check(whole_number(32, 65536))
      ->type_name("N");
  app->add_option("--feed-forward", o.feed_forward, "channels between up and down (default 256)")
      ->check(whole_number(32, 262144))
      ->type_name("N");
  app->add_option("--weights", f->weights, "type of the matrices: f32 (default) or q8_0")
      ->check(one_of({"f32", "q8_0"}));
  app->add_option("-s,--seed", o.seed, "of the weights (default 1)")
      ->check(whole_number(0, 4294967295LL))
      ->type_name("N");
  return {app, [f] { return do_testmodel(f.get()); }};
}

}  // namespace kvant::cli
