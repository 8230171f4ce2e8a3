# frozen_string_literal: true

# Streams the continuation of a prompt from a Kiln runtime, and prints the text as it comes.
#
#   ruby -I gen generate.rb ADDRESS DEPLOYMENT PROMPT

require 'google/rpc/error_details_pb'
require 'grpc'
require 'kiln/runtime/v1/generation_services_pb'

RuntimeV1 = Kiln::Runtime::V1
MAX_NEW_TOKENS = 32

abort 'usage: generate.rb ADDRESS DEPLOYMENT PROMPT' unless ARGV.length == 3
address, deployment, prompt = ARGV

# The runtime's default is plaintext on loopback; elsewhere, give GRPC::Core::ChannelCredentials.
stub = RuntimeV1::GenerationService::Stub.new(address, :this_channel_is_insecure)
request = RuntimeV1::GenerateRequest.new(
  deployment_id: deployment,
  text: prompt,
  sampling: RuntimeV1::SamplingParams.new(temperature: 0),
  stop: RuntimeV1::StopConditions.new(max_new_tokens: MAX_NEW_TOKENS)
)

begin
  stub.generate(request).each do |response|
    case response.event
    when :delta
      print response.delta.text
      $stdout.flush
    when :finished
      finished = response.finished
      puts "\n[#{finished.reason}, #{finished.usage.generated_tokens} tokens]"
    end
  end
rescue GRPC::BadStatus => e
  warn "#{e.class}: #{e.details}"
  # ErrorInfo has the reason; BadRequest, among the same details, has the fields at fault.
  info = Google::Rpc::ErrorInfo
  e.to_rpc_status&.details&.each { |detail| warn "  #{detail.unpack(info)}" if detail.is(info) }
  exit 1
end
