import { z } from "zod";

export const QUESTION = "What is the weather in Oslo?";
export const CITIES = ["Oslo", "Rome"];
export const report = z.object({
  sky: z.enum(["clear", "cloudy", "rain"]),
  degrees: z.int().min(-40).max(50),
  windy: z.boolean(),
});
export const place = z.object({ city: z.enum(CITIES) });
export const getWeather = ({ city }) => `It is 12 degrees in ${city}.`;
